"""`python -m tests.fidelity` prints each published row beside what the virtual GPU says."""

from tests.fidelity import cases

if __name__ == "__main__":
    print(cases.table())
