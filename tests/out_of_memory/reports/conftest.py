"""The programs are run by hand, `memexplore run FILE --gpu GPU`, never imported: importing one trains."""

collect_ignore_glob = ["*.py"]
