"""Questions that libraries ask about a tensor: a virtual one answers as a CUDA tensor does.

About its class a CUDA tensor answers what a real tensor on the CPU does, with which the answers are compared.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, is_fake
from torch.overrides import is_tensor_like
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import memexplore
from memexplore.virtual_gpu.tensors import methods


@pytest.fixture
def gpu() -> Iterator[None]:
    with memexplore.virtual("T4"):
        yield


class Users(torch.Tensor):
    """A class of a user, without a dispatch of its own."""


QUESTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    # transformers/utils/import_utils.py is_tracing; torch/nn/modules/module.py; torch/_tensor_str.py
    "isinstance(x, FakeTensor)": lambda x: isinstance(x, FakeTensor),
    # deepspeed/utils/pin_memory.py; kornia/contrib/distance_transform.py; torch/distributed/fsdp/_init_utils.py
    "is_fake(x)": is_fake,
    # torch/distributed/device_mesh.py; torch/serialization.py
    "detect_fake_mode([x])": lambda x: detect_fake_mode([x]),
    "is_traceable_wrapper_subclass(x)": is_traceable_wrapper_subclass,
    "is_tensor_like(x)": is_tensor_like,
    # accelerate/utils/modeling.py; peft/peft_model.py and diffusers/loaders/lora_pipeline.py look for "Params4bit"
    "x.__class__.__name__": lambda x: x.__class__.__name__,
    # opt_einsum, autoray, tensorly
    "type(x).__module__": lambda x: type(x).__module__,
    # einops' cache of backends; trl/models/activation_offloading.py
    "type(x)": type,
    # timm/optim/_helpers.py; torch/optim/optimizer.py; torch/utils/_foreach_utils.py
    "type(x) in (Tensor, Parameter)": lambda x: type(x) in (torch.Tensor, torch.nn.Parameter),
    # monai/transforms/intensity/array.py
    "type(x) is Tensor": lambda x: type(x) is torch.Tensor,
    # lightning_utilities, torchmetrics
    "isinstance(x, Tensor)": lambda x: isinstance(x, torch.Tensor),
    "isinstance(x, Parameter)": lambda x: isinstance(x, torch.nn.Parameter),
    # accelerate/utils/modeling.py
    "vars(x)": vars,
    "type(type(x)(x.detach()))": lambda x: type(type(x)(x.detach())),
    "torch.Tensor._make_subclass(Users, x)": lambda x: type(torch.Tensor._make_subclass(Users, x)),  # type: ignore[attr-defined]
    "x.as_subclass(Users)": lambda x: type(x.as_subclass(Users)),
    "types of results": lambda x: [type(y) for y in (x + 1, x[0], x.data, x.detach(), x.T, x.to(torch.float64))],
    "copy.copy(x)": lambda x: (type(copy.copy(x)), copy.copy(x).requires_grad),
    "copy.deepcopy(x)": lambda x: (type(copy.deepcopy(x)), copy.deepcopy(x).requires_grad),
    "pickle": lambda x: (type(pickle.loads(pickle.dumps(x))), pickle.loads(pickle.dumps(x)).requires_grad),
    "torch.save and torch.load": lambda x: type(_saved_and_loaded(x)),
    "beginning of repr(x)": lambda x: repr(x).startswith("Parameter containing:\n"),
    "type(gradient)": lambda x: type(_gradient(x)),
}


def _saved_and_loaded(tensor: torch.Tensor) -> Any:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return torch.load(file)


def _gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    leaf = tensor.detach().requires_grad_()
    (leaf * 2).sum().backward()
    return leaf.grad


PLACES: dict[str, Callable[[], torch.Tensor]] = {
    "gpu": lambda: torch.randn(512, 1024, device="cuda"),
    "CPU without values": lambda: torch.nn.Linear(1024, 512).weight.detach(),
}
KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "tensor": lambda tensor: tensor,
    "parameter": torch.nn.Parameter,
    "user's class": lambda tensor: tensor.as_subclass(Users),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("question", QUESTIONS)
def test_answer_is_that_of_a_real_tensor(gpu: None, question: str, kind: str, place: str) -> None:
    if kind == "user's class" and question in ("torch.save and torch.load", "copy.deepcopy(x)"):
        pytest.skip("torch asks for more of a class than this one has")
    real, virtual = KINDS[kind](torch.zeros(2, 2)), KINDS[kind](PLACES[place]())
    assert QUESTIONS[question](virtual) == QUESTIONS[question](real)


def test_place_of_a_tensor_on_the_gpu(gpu: None) -> None:
    tensor = torch.ones(2, 2, device="cuda")
    assert (str(tensor.device), tensor.is_cuda, tensor.is_cpu, tensor.is_meta) == ("cuda:0", True, False, False)
    assert tensor.get_device() == 0
    assert tensor.is_shared()  # what is on a GPU can be sent to other processes: torch.Tensor.is_shared
    assert tensor.type() == "torch.cuda.FloatTensor"
    assert isinstance(tensor, torch.cuda.FloatTensor)
    assert not isinstance(tensor, torch.FloatTensor)


def test_place_of_a_tensor_on_the_cpu_without_values(gpu: None) -> None:
    tensor = torch.nn.Linear(1024, 512).weight
    assert (str(tensor.device), tensor.is_cuda, tensor.is_cpu, tensor.is_meta) == ("cpu", False, True, False)
    assert tensor.get_device() == -1
    assert tensor.type() == "torch.FloatTensor"
    assert isinstance(tensor, torch.FloatTensor)
    assert not isinstance(tensor, torch.cuda.FloatTensor)


def test_copy_of_a_trained_module_has_no_gradients(gpu: None) -> None:
    # Parameter.__deepcopy__ of torch/nn/parameter.py clones the data.
    module = torch.nn.Linear(512, 512, device="cuda")
    module(torch.ones(1, 512, device="cuda")).sum().backward()
    before = torch.cuda.memory_allocated()
    copied = copy.deepcopy(module)
    assert torch.cuda.memory_allocated() - before == 512 * 512 * 4 + 512 * 4  # weight and bias
    assert copied.weight.grad is None


def test_copy_of_a_tensor_has_its_gradient(gpu: None) -> None:
    # Tensor.__deepcopy__ of torch/_tensor.py
    tensor = torch.ones(4, device="cuda", requires_grad=True)
    (tensor * 3).sum().backward()
    copied = copy.deepcopy(tensor)
    assert copied.grad is not None
    assert copied.grad.tolist() == [3, 3, 3, 3]


def test_parameter_is_made_of_a_value_as_accelerate_does(gpu: None) -> None:
    weight = torch.nn.Linear(512, 512, device="cuda").weight
    other = type(weight)(weight.cpu(), requires_grad=weight.requires_grad, **vars(weight))
    assert type(other) is torch.nn.Parameter
    assert other.device.type == "cpu"


def test_parameter_subclass_is_made_of_a_tensor_as_bitsandbytes_does(gpu: None) -> None:
    class Quantized(torch.nn.Parameter):
        def __new__(cls, data: torch.Tensor) -> Any:
            return torch.Tensor._make_subclass(cls, data, False)  # type: ignore[attr-defined]

    made = Quantized(torch.ones(4, device="cuda"))
    assert type(made) is Quantized
    assert made.is_cuda
    assert type(made.to(torch.float16)) is torch.Tensor  # as of any class without a __torch_function__


# --- the methods of torch.Tensor --------------------------------------------------------------------------------------


def _own_names() -> dict[str, Any]:
    return {name: vars(torch.Tensor).get(name) for name in methods.NAMES}


def test_tensor_is_as_torch_made_it_when_the_last_virtual_tensor_has_died() -> None:
    gc.collect()
    before = _own_names()
    with memexplore.virtual("T4"):
        tensor = torch.ones(2, device="cuda")
        module = torch.nn.Linear(1024, 512)
        empty = torch.ones(0, device="cuda")
        assert all(vars(torch.Tensor)[name] is not before[name] for name in methods.NAMES)
    assert tensor.is_cuda
    del tensor
    assert empty.is_cuda
    del empty
    assert module.weight.device.type == "cpu"
    del module
    assert _own_names() == before


def test_method_that_a_library_has_put_on_tensor_stays_and_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []
    with memexplore.virtual("T4"):
        ours = torch.Tensor.__repr__

        def shown(tensor: torch.Tensor, **options: Any) -> str:
            texts.append(ours(tensor, **options))
            return "shown"

        monkeypatch.setattr(torch.Tensor, "__repr__", shown)
        assert repr(torch.ones(1, device="cuda")) == "shown"
    gc.collect()
    texts.clear()
    with memexplore.virtual("T4"):
        assert repr(torch.zeros((), device="cuda").expand(2, 3).relu()[0]) == "shown"
    assert repr(torch.ones(1)) == "shown"
    assert texts[-1] == "tensor([1.])"


def test_real_tensors_answer_while_a_virtual_gpu_is_on(gpu: None) -> None:
    real = torch.arange(3.0, requires_grad=True)
    assert (real.device.type, real.is_cuda, real.is_meta, real.get_device()) == ("cpu", False, False, -1)
    assert real.tolist() == [0, 1, 2]
    assert copy.copy(real).data_ptr() == real.data_ptr()
    assert copy.deepcopy(real).data_ptr() != real.data_ptr()
    assert pickle.loads(pickle.dumps(real)).tolist() == [0, 1, 2]
    assert repr(real) == "tensor([0., 1., 2.], requires_grad=True)"
    assert torch.ones(2, device="meta").is_meta


# --- programs ---------------------------------------------------------------------------------------------------------


def test_causal_model_with_a_mask_of_ones_builds_no_mask(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5 skips a mask of ones, unless it is being traced: so does a real GPU."""
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    masks: list[Any] = []
    forward = modeling.LlamaAttention.forward

    def watched(*args: Any, **options: Any) -> Any:
        masks.append(options.get("attention_mask"))
        return forward(*args, **options)

    monkeypatch.setattr(modeling.LlamaAttention, "forward", watched)
    config = modeling.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=1,
        vocab_size=100,
    )
    model = modeling.LlamaForCausalLM(config).cuda()
    tokens = torch.randint(100, (2, 128), device="cuda")
    model(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=tokens).loss.backward()
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    assert masks == [None, None]


def test_accelerate_offloads_a_model_to_the_cpu(gpu: None) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    accelerate.cpu_offload(model, execution_device=torch.device("cuda:0"))
    result = model(torch.randn(4, 64, device="cuda"))
    assert result.shape == (4, 8)
    assert result.is_cuda


def test_opt_einsum_finds_the_backend_of_a_virtual_tensor(gpu: None) -> None:
    opt_einsum = pytest.importorskip("opt_einsum")
    first, second = torch.randn(4, 5, device="cuda", requires_grad=True), torch.randn(5, 6, device="cuda")
    assert opt_einsum.contract("ij,jk->ik", first, second).shape == (4, 6)
