"""`python -m tests.fidelity [TEXT]` prints each case beside what every tool says; TEXT chooses cases by name."""

import sys

from tests.fidelity import table

if __name__ == "__main__":
    print(table.markdown(table.computed(*sys.argv[1:2])))
