"""Folders of watched runs: one sub-folder for each rank, Parquet files that DuckDB, Dask and others read as they are.

    FOLDER/rank=0/run.json                                 device, state and error of the rank
    FOLDER/rank=0/steps/steps-1-64.parquet                 rows of steps, one file for each range of steps
    FOLDER/rank=0/tapes/step-12.parquet                    the tape of a recorded step (`Tape.save`)

- `rows`: the row of one step, and its columns in files.
- `descriptions`: what `run.json` says.
- `writer`: writes the folder of one rank while it runs; each file appears complete or not at all.
- `ranks`: all ranks of a folder side by side, read with DuckDB. `loading`: `mx.load` of files and folders.
"""
