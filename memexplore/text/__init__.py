"""Text for people: sizes, shapes, names of notebook cells, paths of results. Nothing here knows what a tape is.

- `units`: bytes as text and back. `tensor_text`: shapes and dtypes as text.
- `untrusted`: what may be shown of texts that other programs wrote.
- `ipython_shell`: the running IPython shell, without an import of IPython.
- `result_files`: paths of results, refused before a run where they cannot be written.
- `package`: the release, the folder and the extras of memexplore.
"""
