"""The scripts are run by `test_scripts`, never imported: importing one trains."""

collect_ignore_glob = ["*/*.py"]
