"""Folders of ranks: tapes of several processes of one run, side by side.

A run that is watched (`watch(folder=...)`, `memexplore run --live FOLDER`) has a sub-folder for each rank:

    FOLDER/rank=0/run.json       device, state and error of the rank, and what its steps come to
    FOLDER/rank=0/steps.jsonl    the rows of its steps, one JSON object a line
    FOLDER/rank=0/step-12.tape   the tape of a recorded step (`Tape.save`)

A run that was recorded as a whole (`memexplore run --world`) has one tape for each rank, `FOLDER/rank-0.tape`.

- `rows`: the row of one step, as a line of a file, and what rows come to. `descriptions`: what `run.json` says.
- `writer`: writes the folder of one rank while it runs.
- `watched`, `recorded`: one rank of a folder, of either kind. `ranks`: all ranks side by side.
- `loading`: `mx.load` of files and folders. `export`: a folder as Parquet files for other programs.
"""
