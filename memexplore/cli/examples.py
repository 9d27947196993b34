"""Examples at the end of the help of each command, as lines that can be typed."""

from __future__ import annotations

EXAMPLES = {
    "": {
        'memexplore run train.py --gpu "RTX 4090"': "does this script fit, and where does its memory go?",
        "memexplore open snapshot.pickle": "what was in a snapshot of torch.cuda.memory?",
        "memexplore lab": "the notebooks",
    },
    "run": {
        "memexplore run train.py": "on this machine's GPU, or on a virtual T4",
        'memexplore run train.py --gpu "RTX 4090" --html report.html -- --batch-size 64': "on a virtual GPU",
        "memexplore run train.py --gpu H100 --world 8 --rank all": "a script of torchrun, as each distinct rank of 8",
        "memexplore run train.py --gpu T4 --advise": "if it runs out of memory: what would have fitted",
        "memexplore run --gpu 24GiB --json -m package.train": "a module, with a result for programs",
    },
    "compare": {
        "memexplore compare train.py": "is the prediction right on this machine's GPU, and what differs?",
        "memexplore compare train.py --share measured.json -- --batch-size 64": "a file for an issue, without names",
        "memexplore compare measured.tape predicted.tape": "two tapes of `memexplore run -o`",
    },
    "open": {
        "memexplore open snapshot.pickle --html report.html": "a file of torch.cuda.memory._dump_snapshot",
        "memexplore open run/": "a folder of a watched run, with all its ranks",
        "memexplore open snapshots/": "a file of each rank: which one ran out of memory first, and why",
    },
    "export": {"memexplore export run/ --parquet": "the steps and tapes of all ranks, as tables with a column rank"},
    "verify": {"memexplore verify snapshot.pickle": "how many addresses does the allocator model get right?"},
    "gpus": {
        "memexplore gpus": "all GPUs",
        "memexplore gpus A100-40GB --release 2.11": "one GPU, with the source of each number",
    },
    "lab": {"memexplore lab --no-browser --port 8890": "prints an address that another machine's browser can open"},
    "doctor": {"memexplore doctor": "before you report a problem"},
}
"""Command, empty for all together -> lines and what they are for."""


def text(command: str = "") -> str:
    """Return the examples of a command, of all commands together for an empty name.

    >>> print(text("verify"))
    examples:
      memexplore verify snapshot.pickle
          how many addresses does the allocator model get right?
    """
    lines = [f"  {line}\n      {meaning}" for line, meaning in EXAMPLES[command].items()]
    return "\n".join(["examples:", *lines])
