import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memexplore.analysis import curves, summary, tables
from memexplore.analysis.tables import NO_LAYER, module_parents
from memexplore.tape import Action, Category, Frame, Meta, Tape
from memexplore.text.tensor_text import interned
from tests.sample_tapes import CPU, GIB, MIB, T4, leaking_tape, oom_tape, small_tape, training_tape

ALLOC, REQUESTED, COMPLETED = Action.ALLOC, Action.FREE_REQUESTED, Action.FREE_COMPLETED


def tape_of(*rows: tuple[Action, int, int], meta: Meta = CPU) -> Tape:
    """Return a tape of (action, address, size) rows."""
    action, address, size = zip(*rows, strict=True)
    return Tape.from_columns({"action": action, "address": address, "size": size}, meta=meta)


def test_allocated_decreases_at_free_requested():
    tape = tape_of((ALLOC, 0, 10), (ALLOC, 512, 20), (REQUESTED, 0, 10), (COMPLETED, 0, 10))
    assert curves.curve(tape, "allocated").tolist() == [10, 30, 20, 20]


@pytest.mark.parametrize("name", ["active", "requested"])
def test_active_and_requested_decrease_at_free_completed(name):
    tape = tape_of((ALLOC, 0, 10), (ALLOC, 512, 20), (REQUESTED, 0, 10), (COMPLETED, 0, 10))
    assert curves.curve(tape, name).tolist() == [10, 30, 30, 20]


def test_block_without_free_completed_stays_active():
    tape = tape_of((ALLOC, 0, 10), (ALLOC, 512, 20), (REQUESTED, 0, 10), (REQUESTED, 512, 20), (COMPLETED, 512, 20))
    assert curves.curve(tape, "active").tolist() == [10, 30, 30, 30, 10]


def test_tape_without_free_completed_uses_free_requested():
    tape = tape_of((ALLOC, 0, 10), (REQUESTED, 0, 10))
    assert curves.curve(tape, "active").tolist() == [10, 0]


def test_free_completed_without_request_is_a_free():
    tape = tape_of((Action.PREEXISTING, 0, 10), (COMPLETED, 0, 10))
    assert curves.curve(tape, "allocated").tolist() == [10, 0]


def test_alloc_at_a_used_address_ends_the_earlier_block():
    tape = tape_of((ALLOC, 0, 10), (ALLOC, 0, 30))
    assert curves.curve(tape, "allocated").tolist() == [10, 30]
    assert curves.free_rows(tape).tolist() == [1, 2]


def test_free_of_an_unknown_block_is_ignored():
    tape = tape_of((REQUESTED, 4096, 10), (ALLOC, 0, 20))
    assert curves.curve(tape, "allocated").tolist() == [0, 20]


def test_reserved_is_the_sum_of_segments():
    tape = tape_of(
        (Action.SEGMENT_ALLOC, 0, 2 * MIB),
        (Action.SEGMENT_MAP, 4 * MIB, 20 * MIB),
        (ALLOC, 0, 512),
        (Action.SEGMENT_UNMAP, 4 * MIB, 20 * MIB),
        (REQUESTED, 0, 512),
        (COMPLETED, 0, 512),
        (Action.SEGMENT_FREE, 0, 2 * MIB),
        meta=T4,
    )
    # 2, then 2 + 20, then 2 again, then nothing
    assert (curves.curve(tape, "reserved") // MIB).tolist() == [2, 22, 22, 2, 2, 2, 0]


def test_reserved_without_segments_equals_active():
    tape = small_tape()
    assert np.array_equal(curves.curve(tape, "reserved"), curves.curve(tape, "active"))


def test_unknown_curve_raises():
    with pytest.raises(ValueError, match="unknown curve 'used'"):
        curves.curve(small_tape(), "used")  # type: ignore[arg-type]


def test_tape_that_is_not_placed_raises():
    with pytest.raises(ValueError, match=r"call memexplore\.replay"):
        curves.curve(tape_of((ALLOC, -1, 10)))


def test_empty_tensor_needs_no_address():
    assert curves.curve(tape_of((ALLOC, -1, 0), (ALLOC, 0, 10))).tolist() == [0, 10]


def test_curve_of_the_small_tape():
    expected = [400, 400, 500, 700, 750, 700, 700, 700, 500, 500, 740, 640, 640, 640, 720]
    assert curves.curve(small_tape()).tolist() == expected


def test_peak_is_the_highest_value_and_its_first_row():
    assert curves.peak(small_tape()) == (750, 4)


def test_peak_of_an_empty_tape():
    assert curves.peak(small_tape()[:0]) == (0, -1)


def test_live_rows_are_allocs_before_their_free():
    # weight (row 0), input (2), activation (3), temporary (4)
    assert curves.live_rows(small_tape(), 4).tolist() == [0, 2, 3, 4]


def test_live_rows_outside_the_tape_raise():
    with pytest.raises(IndexError, match="row 15 is outside this tape of 15 rows"):
        curves.live_rows(small_tape(), 15)


def test_by_category_at_the_peak():
    shares = curves.by_category(small_tape())[:, 4]
    assert shares[[Category.PARAMETER, Category.ACTIVATION, Category.INPUT, Category.TEMPORARY]].tolist() == [
        400, 200, 100, 50,
    ]  # fmt: skip


def test_by_category_of_a_window_equals_the_slice():
    tape = training_tape()
    assert np.array_equal(curves.by_category(tape, window=slice(500, 900)), curves.by_category(tape)[:, 500:900])


@st.composite
def programs(draw: st.DrawFn) -> Tape:
    """Draw a tape of random allocs and frees whose `free_completed` rows come late or never."""
    rows: list[tuple[Action, int, int, int]] = []
    alive: list[tuple[int, int, int]] = []
    pending: list[tuple[int, int, int]] = []
    for number, (choice, size, kind) in enumerate(
        draw(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5000), st.integers(0, 8)), max_size=60))
    ):
        if choice == 0 or not (alive or pending):
            alive.append((number * 8192, size, kind))
            rows.append((ALLOC, *alive[-1]))
        elif choice == 1 and alive:
            pending.append(alive.pop(size % len(alive)))
            rows.append((REQUESTED, *pending[-1]))
        elif pending:
            rows.append((COMPLETED, *pending.pop(size % len(pending))))
    columns = np.array(rows, dtype=np.int64).reshape(-1, 4).T
    return Tape.from_columns(dict(zip(("action", "address", "size", "category"), columns, strict=True)), meta=CPU)


@given(programs())
def test_active_is_at_least_allocated_and_allocated_at_least_zero(tape):
    allocated, active = curves.curve(tape, "allocated"), curves.curve(tape, "active")
    assert np.all(active >= allocated)
    assert np.all(allocated >= 0)


@given(programs())
def test_categories_sum_to_allocated(tape):
    assert np.array_equal(curves.by_category(tape).sum(axis=0), curves.curve(tape))


@given(programs())
def test_live_blocks_sum_to_allocated(tape):
    sums = [int(tape.size[curves.live_rows(tape, row)].sum()) for row in range(len(tape))]
    assert sums == curves.curve(tape).tolist()


# -- the tree and the layers


def test_module_parents_adds_missing_modules():
    assert module_parents(("Net", "a.b.c")) == {"Net": "", "a": "Net", "a.b": "a", "a.b.c": "a.b"}


def test_module_parents_sorts_by_number():
    assert list(module_parents(("Net", "block.10", "block.2"))) == ["Net", "block", "block.2", "block.10"]


def test_layers_own_bytes():
    table = tables.layers(small_tape())
    own = ["activation", "parameter", "gradient", "optimizer_state"]
    assert table.loc["fc", own].tolist() == [200, 400, 240, 80]
    assert table.loc["Net", own].tolist() == [0, 0, 0, 0]


def test_layers_total_includes_submodules():
    table = tables.layers(small_tape())
    assert table.loc["Net", ["activation_total", "parameter_total", "gradient_total"]].tolist() == [200, 400, 240]


def test_layers_peak_is_the_highest_value_in_its_rows():
    table = tables.layers(small_tape())
    # fc runs in rows 3 (700), 8 to 10 (500, 500, 740) and 14 (720), Net in rows 4 to 6 (750, 700, 700)
    assert table.loc["fc", "peak"] == 740
    assert table.loc["Net", ["peak", "peak_total"]].tolist() == [750, 750]


def test_layers_columns_sum_to_the_categories():
    tape = training_tape()
    table = tables.layers(tape)
    _, row = curves.peak(tape)
    in_step = tape.step == tape.step[row]
    requested = curves.by_category(tape, "requested")[:, in_step]
    for kind in (Category.PARAMETER, Category.BUFFER, Category.GRADIENT, Category.OPTIMIZER_STATE, Category.ACTIVATION):
        assert table[kind.name.lower()].sum() == requested[kind].max()


def test_memory_without_a_layer_has_its_own_row():
    tape = Tape.from_columns({"address": [0], "size": [64], "category": [Category.PARAMETER]}, meta=CPU)
    assert tables.layers(tape).loc[NO_LAYER, "parameter"] == 64


def test_layers_of_an_empty_tape():
    assert tables.layers(small_tape()[:0])["activation"].sum() == 0


# -- tensors and lines


def test_tensors_at_the_peak_are_sorted_by_size():
    table = tables.tensors(small_tape())
    assert table["size"].tolist() == [400, 200, 100, 50]
    assert table.index.tolist() == [0, 3, 2, 4]


def test_tensors_have_their_origin():
    tensor = tables.tensors(small_tape(), count=2).loc[3]
    assert tensor[["category", "layer", "op", "phase", "step", "line"]].tolist() == [
        "activation", "fc", "addmm", "forward", 1, "train.py:6",
    ]  # fmt: skip


def with_tensors(tape: Tape, texts: dict[int, str]) -> Tape:
    """Return a tape whose rows have tensors of some shapes and dtypes."""
    numbers, table = interned(texts.get(row, "") for row in range(len(tape)))
    return tape.replace(tensor=np.array(numbers, dtype=np.int32), tensor_texts=table)


def test_tensors_have_their_shape_and_dtype():
    # 10 * 10 * 4 = 400 bytes, 4 * 25 * 2 = 200
    tape = with_tensors(small_tape(), {0: "float32[10, 10]", 3: "bfloat16[4, 25]", 4: "int8[]"})
    table = tables.tensors(tape)
    assert table["dtype"].tolist() == ["float32", "bfloat16", "", "int8"]
    assert table["shape"].tolist() == [(10, 10), (4, 25), None, ()]


def test_equal_tensors_have_the_same_shape_and_dtype():
    # Six blocks of 400 bytes in layers of one form: 4 * 100, 4 * 10 * 10 and 2 * 20 * 10 bytes are three kinds.
    texts = ["float32[100]", "float32[10, 10]", "float32[10, 10]", "float16[20, 10]", "float32[10, 10]", ""]
    tape = Tape.from_columns(
        {"address": np.arange(6) * 512, "size": [400] * 6, "module": range(6)},
        modules=[f"h.{number}" for number in range(6)],
        meta=CPU,
    )
    groups = tables.tensor_groups(with_tensors(tape, dict(enumerate(texts))))
    assert groups[["count", "total", "dtype", "shape", "layer"]].to_numpy().tolist() == [
        [3, 1200, "float32", (10, 10), "h.*"],  # 3 * 400
        [1, 400, "float32", (100,), "h.0"],
        [1, 400, "float16", (20, 10), "h.3"],
        [1, 400, "", None, "h.5"],
    ]


def test_tensors_after_another_row():
    # after row 10: the weight, the input and the gradient
    assert tables.tensors(small_tape(), 10)["size"].tolist() == [400, 240, 100]


@pytest.mark.parametrize(
    "installed",
    [
        "/opt/conda/lib/python3.10/site-packages/torch/nn/modules/module.py",
        "/usr/lib/python3/dist-packages/numpy/core.py",
        "/usr/lib/python3.12/contextlib.py",
        "C:\\env\\Lib\\site-packages\\torch\\functional.py",
        "/src/pytorch/torch/nn/functional.py",
        "<frozen runpy>",
    ],
)
def test_user_line_skips_installed_code(installed):
    stack = (Frame(installed, 1, "call"), Frame("/home/me/train.py", 12, "step"))
    assert tables.user_line(stack) == "/home/me/train.py:12"


@pytest.mark.parametrize("users", ["/home/me/3d_segmentation/torch/train.py", "torch/train.py", "/torch/main.py"])
def test_a_folder_named_torch_can_be_the_users(users):
    stack = (Frame("/env/site-packages/torch/_tensor.py", 1, "__torch_function__"), Frame(users, 12, "step"))
    assert tables.user_line(stack) == f"{users}:12"


def test_user_line_can_be_a_notebook_cell():
    stack = (Frame("/tmp/ipykernel_7/1234.py", 3, "<module>"), Frame("/home/me/train.py", 12, "step"))
    assert tables.user_line(stack) == "/tmp/ipykernel_7/1234.py:3"


def test_user_line_of_installed_code_is_the_innermost():
    stack = (Frame("/env/site-packages/a.py", 1, "f"), Frame("/env/site-packages/b.py", 2, "g"))
    assert tables.user_line(stack) == "/env/site-packages/a.py:1"


def test_an_object_file_of_a_library_is_no_line_of_the_user():
    # The thread of the autograd engine, as a snapshot with stacks of C++ has it.
    engine = Frame("??", 0, "torch::autograd::Engine::thread_main(std::shared_ptr<torch::autograd::GraphTask> const&)")
    assert tables.user_line((engine, Frame("thread48.o", 0, "execute_native_thread_routine"))) == "autograd engine"


# -- summary


def test_summary_of_the_small_tape():
    assert summary.summary(small_tape()) == {
        "source": "measured",
        "gpu": "cpu",
        "capacity": None,
        "capacity_without_limit": None,
        "outcome": "fits",
        "peak_requested": 750,
        "peak_allocated": 750,
        "peak_reserved": 750,
        "need": None,
        "steps": 1,
        "at_peak": {
            "step": 1,
            "phase": "forward",
            "layer": "Net",
            "op": "relu",
            "line": "train.py:7",
            "by_category": {
                "parameter": 400, "buffer": 0, "optimizer state": 0, "gradient": 0, "activation": 200, "input": 100,
                "temporary": 50, "workspace": 0, "unknown": 0,
                "gathered parameter": 0, "gradient bucket": 0, "communication buffer": 0,
            },
        },
        "error": None,
        "failed_request": None,
        "caught_requests": [],
        "growth": None,
        "rank": None,
        "world": None,
        "nccl": None,
        "notes": [],
    }  # fmt: skip


def test_summary_of_an_oom():
    result = summary.summary(oom_tape())
    assert (result["outcome"], result["gpu"], result["peak_reserved"]) == ("oom", "T4", 3 * GIB)


def test_summary_has_the_growth_and_its_line():
    # 100 bytes from line 9 stay in every step; a CPU is never full
    grown = summary.summary(leaking_tape(4))["growth"]
    assert (grown["period"], grown["bytes_per_period"], grown["full_at"], grown["line"]) == (
        "step",
        100,
        None,
        "train.py:9",
    )
