"""`python -m tests.data.make [FOLDER]`: write the kept recordings and tables from the collection in FOLDER.

FOLDER holds `recordings/*.pickle.gz`, `recordings/index.csv` and `published_peaks.csv`; by default it is `shared`
beside the checkout. `tests/data/test_kept.py` compares the kept files with it.
"""

from __future__ import annotations

import argparse
import pathlib
import shutil

from memexplore.snapshot import read
from tests.data import kept

COLLECTION = pathlib.Path(__file__).parents[3] / "shared"


def main() -> None:
    """Write every file and print its size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=pathlib.Path, nargs="?", default=COLLECTION)
    folder = parser.parse_args().folder
    kept.RECORDINGS.mkdir(exist_ok=True)
    total = 0
    for path in sorted((folder / "recordings").glob("*.pickle.gz")):
        size = kept.write(kept.RECORDINGS / f"{path.name.removesuffix('.pickle.gz')}.json.gz", read(path))
        total += size
        print(f"{size:>9,}  {path.name}")
    print(f"{total:>9,}  all")
    shutil.copyfile(folder / "recordings" / "index.csv", kept.INDEX)
    shutil.copyfile(folder / "published_peaks.csv", kept.PUBLISHED_PEAKS)


if __name__ == "__main__":
    main()
