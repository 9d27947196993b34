"""Keep what is known of the values of virtual tensors, and give user code a number for each value that is not.

- known_values.py: the storages whose contents are known, each with a copy on the CPU. real_tensors.py: torch's own
  functions to make such tensors.
- reading.py: the value that user code gets (`item()`, `if tensor:`, printing): the known one, or a number that counts
  as 1.
- virtual_numbers.py, virtual_array.py: numbers and arrays that stand for unknown values and print as virtual.
- value_hints.py: facts about values: the result of a test such as `isnan`, the share of a mask that is true. Add an op
  to `RULES` when code after it depends on its values.
- value_reads.py: how many unknown values the program has read, and loops that wait for one.
- notes.py: assumptions and notes for the tape. setting.py: `Values`, which values are computed.

A tensor's hints are in its `__dict__`, read with `value_hints.of` and written with `value_hints.put` after each op
(`Plan.set_hints`).
"""
