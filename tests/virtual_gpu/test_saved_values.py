"""Known values of virtual tensors and unknown numbers in files: `torch.save`, `pickle` and `torch.load`."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch

import memexplore as mx


def _file(value: Any, **options: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file, **options)
    file.seek(0)
    return file


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("options", [{}, {"_use_new_zipfile_serialization": False}])
def test_known_values_are_known_after_loading(options, weights_only):
    with mx.virtual("T4"):
        lengths = torch.tensor([3, 4], device="cuda")
        loaded = torch.load(_file({"n": lengths}, **options), weights_only=weights_only)["n"]
        assert loaded.is_cuda
        assert loaded.tolist() == [3, 4]
        loaded += 1
        assert (loaded.tolist(), lengths.tolist()) == ([4, 5], [3, 4])


@pytest.mark.parametrize("target", ["cpu", torch.device("cpu"), {"cuda:0": "cpu"}, lambda storage, place: storage])
def test_known_values_are_loaded_onto_the_cpu(target):
    with mx.virtual("T4"):
        file = _file(torch.tensor([3, 4], device="cuda"))
        loaded = torch.load(file, map_location=target)
        assert (loaded.device.type, loaded.tolist()) == ("cpu", [3, 4])


def test_a_view_keeps_its_values_and_strides():
    with mx.virtual("T4"):
        view = torch.arange(6, device="cuda").view(2, 3).t()
        loaded = torch.load(_file(view))
        assert (loaded.stride(), loaded.tolist()) == ((1, 3), [[0, 3], [1, 4], [2, 5]])


def test_parameters_keep_their_values_with_real_values():
    with mx.virtual("T4", values="real"):
        layer = torch.nn.Linear(3, 2).cuda()
        layer.bias.requires_grad_(False)
        loaded = torch.load(_file(layer), weights_only=False)
        assert torch.equal(loaded.weight, layer.weight)
        assert isinstance(loaded.weight, torch.nn.Parameter)
        assert (loaded.weight.requires_grad, loaded.bias.requires_grad) == (True, False)
        before = layer.weight.tolist()
        file = _file(layer.state_dict())
        layer.weight.data.zero_()
        layer.load_state_dict(torch.load(file))
        assert layer.weight.tolist() == before


def test_pickled_and_copied_tensors_keep_their_values():
    with mx.virtual("T4"):
        number = torch.tensor(5, device="cuda")
        assert pickle.loads(pickle.dumps(number)).item() == 5
        assert copy.copy(number).item() == 5


def test_unknown_values_stay_unknown():
    with mx.virtual("T4"):
        loaded = torch.load(_file(torch.empty(2, device="cuda")))
        assert str(loaded[0].item()) == "virtual"


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_an_unknown_number_is_saved_as_an_ordinary_one(dtype):
    with mx.virtual("T4"):
        number = torch.empty(1, device="cuda", dtype=dtype).item()
        file = _file({"best": number})
        assert torch.load(file, weights_only=True) == {"best": 1}
        pickled = pickle.dumps(number)
        assert str(copy.deepcopy(number)) == "virtual"
    assert b"memexplore" not in pickled
    assert type(pickle.loads(pickled)) in (float, int)
    file.seek(0)
    assert torch.load(file, weights_only=False) == {"best": 1}


def test_a_file_of_known_values_is_real_where_no_virtual_gpu_is_on():
    with mx.virtual("T4"):
        file = _file({"n": torch.tensor([3, 4], device="cuda")})
    loaded: Any = torch.load(file, weights_only=False)["n"]
    assert (type(loaded), loaded.device.type, loaded.tolist()) == (torch.Tensor, "cpu", [3, 4])


@pytest.mark.parametrize("values", ["known", "real"])
@pytest.mark.parametrize("target", ["cuda", lambda storage, place: storage.cuda()])
def test_a_file_of_real_tensors_keeps_its_values_on_the_device(target, values):
    state = torch.get_rng_state()
    whole = torch.arange(6)
    file = _file({"random": state, "whole": whole, "part": whole[2:4]})
    with mx.virtual("T4", values=values):
        loaded = torch.load(file, map_location=target)
        assert loaded["random"].is_cuda
        assert torch.equal(loaded["random"].cpu(), state)
        torch.set_rng_state(loaded["random"].cpu())
        loaded["part"] += 5
        assert loaded["whole"].tolist() == [0, 1, 7, 8, 4, 5]


def _chosen() -> torch.Tensor:
    """The classes that unknown scores choose: spread evenly, which is an assumption."""
    return torch.empty(8, 4, device="cuda").mul_(2).argmax(-1)


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("options", [{}, {"_use_new_zipfile_serialization": False}])
def test_an_assumed_value_is_still_assumed_after_loading(options, weights_only):
    with mx.virtual("T4"):
        chosen = _chosen()
        loaded = torch.load(_file({"n": chosen}, **options), weights_only=weights_only)["n"]
        assert repr(loaded[0].item()) == repr(chosen[0].item()) == "virtual"
        assert repr((loaded == 0).sum().item()) == "virtual"
        # Four classes have two of the eight rows each, as before.
        assert len(torch.ones(8, device="cuda")[loaded == 0]) == len(torch.ones(8, device="cuda")[chosen == 0]) == 2
        assert repr(pickle.loads(pickle.dumps(chosen))[0].item()) == "virtual"


def test_assumed_values_that_are_loaded_onto_the_cpu_have_a_note_with_the_line():
    with mx.virtual("T4"), mx.record() as recording:
        file = _file(_chosen())
        torch.load(file, map_location="cpu")
    assert [note.partition(" (")[0] for note in recording.tape.meta.notes if "test_saved_values.py" in note] == [
        "assumed: what unknown scores choose, such as experts, tokens or classes, is spread evenly over all candidates"
    ]


def test_assumed_values_are_no_values_where_no_virtual_gpu_is_on():
    with mx.virtual("T4"):
        file = _file(_chosen())
    with pytest.raises(ValueError, match=r"^a tensor of shape \(8,\) was saved on a virtual GPU and has no values"):
        torch.load(file, weights_only=False)
