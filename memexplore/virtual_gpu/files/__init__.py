"""Keep a program from replacing files that hold values while a virtual GPU is on.

Changed files go to a temporary folder, the overlay, which mirrors the user's folders; a read looks there first.

- `overlay.py`: `Overlay`, from a path to the file that a read or write uses.
- `policy.py`: which changes go to the overlay: in `memexplore run` those of all files that existed before, elsewhere
  those of tensors; checkpoints always. `paths.py`: parts of paths.
- `replacements.py`: the functions of `open`, `os` and `shutil` with the overlay below. `folders.py`: merged listings.
- `tensor_files.py`: `torch.save`. `array_files.py`: archives of numpy, `pickle.dump` and h5py.
- `safetensors_files.py`: the safetensors library.
- `script_module_files.py`: TorchScript, whose C++ code opens files. `tokenizer_files.py`: the tokenizers library, whose
  Rust code does.
- `holes.py`: files that a program writes itself, with a hole for each array of unknown values.
- `elsewhere.py`: files that another rank of a distributed run has written.
- `session.py`: the overlay of the virtual GPU that is on, and its report at the end.
"""
