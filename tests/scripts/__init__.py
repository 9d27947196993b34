"""Scripts as people write them, by library, and the table of what runs on a virtual GPU, docs/scripts.md.

- one folder per library: ordinary training and inference scripts, most of them adapted from the library's own examples
  to tiny models and to data that is generated or shipped with a package. They know nothing of memexplore.
- `requirements.txt`: the libraries that the scripts use, beyond the extra `[test]`
- `script_list`: the scripts, their libraries, arguments and environment variables
- `runs`: one run of a script, with plain Python on the CPU or with `memexplore run`
- `outputs`: compares the printed lines of the two runs; `outputs.json` keeps the lines of the CPU runs
- `table`: the results, `results.json`, and the Markdown page
- `test_scripts`: the tests, which run 20 of the scripts: one for each way in which a program is special

`python -m tests.scripts` runs all of them and writes the table.

To add a script, put it into a folder and run `python -m tests.scripts FOLDER/NAME`. It joins the tests only if it is
special in a way of which they have no example yet.
"""
