"""Tensor classes of users on the virtual GPU: class, attributes and `__torch_function__` are theirs."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import memexplore


class Plain(torch.Tensor):
    """A class without methods."""


class Keeping(torch.Tensor):
    """Results have the attributes of the first argument, as fastai's do: `__dict__` is replaced."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(result, Keeping) and args and isinstance(args[0], Keeping):
            result.__dict__ = copy.copy(args[0].__dict__)
        return result


class Tagged(torch.Tensor):
    """A class with a constructor of its own, as torchvision's and MONAI's."""

    tag: Any

    def __new__(cls, data: Any, tag: Any = None) -> Tagged:
        result = torch.as_tensor(data).as_subclass(cls)
        result.tag = tag
        return result

    def __init__(self, data: Any, tag: Any = None) -> None:
        self.initialized = True

    def doubled(self) -> torch.Tensor:
        return self * 2


class Detached(torch.Tensor):
    """A class made without the graph of autograd."""

    @staticmethod
    def __new__(cls: type, data: Any) -> Any:
        return torch.Tensor._make_subclass(cls, data)


CLASSES = [Plain, Keeping, Tagged, Detached]


@pytest.fixture(autouse=True)
def gpu() -> Iterator[None]:
    with memexplore.virtual("T4"):
        yield


@pytest.mark.parametrize("kind", CLASSES)
def test_constructor_of_a_users_class_takes_a_virtual_tensor(kind: Any) -> None:
    tensor = kind(torch.ones(3, 4, device="cuda"))
    assert type(tensor) is kind
    assert tensor.is_cuda


@pytest.mark.parametrize("kind", CLASSES)
def test_tensor_of_a_users_class_keeps_its_class_on_the_way_to_the_gpu_and_back(kind: Any) -> None:
    tensor = kind(torch.ones(3, 4)).to("cuda")
    assert isinstance(tensor, kind)
    assert tensor.is_cuda
    back = tensor.cpu()
    assert type(back) is kind
    assert back.device.type == "cpu"


@pytest.mark.parametrize("kind", CLASSES)
def test_results_of_ops_have_the_users_class_and_their_values(kind: Any) -> None:
    total = (kind(torch.ones(3, 4, device="cuda")) + 1).sum()
    assert isinstance(total, kind)
    assert total.item() == 24  # 12 elements of 1 + 1


def test_constructor_of_the_user_runs() -> None:
    on_gpu = Tagged(torch.ones(2, device="cuda"), "gpu")
    assert type(on_gpu) is Tagged
    assert on_gpu.is_cuda
    assert on_gpu.tag == "gpu"
    assert on_gpu.initialized


def test_torch_function_of_the_user_may_replace_the_attributes() -> None:
    image = torch.ones(2, 2, device="cuda").as_subclass(Keeping)
    image.label = "cat"  # type: ignore[attr-defined]
    result = image + 1
    assert result.is_cuda
    assert result.label == "cat"  # type: ignore[attr-defined]
    assert vars(result) == {"label": "cat"}


def test_torch_function_of_the_user_gets_the_users_class() -> None:
    seen: list[Any] = []

    class Seeing(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append((cls, *types))
            return super().__torch_function__(func, types, args, kwargs or {})

    torch.ones(2, device="cuda").as_subclass(Seeing).exp()
    assert all(kind is Seeing for entry in seen for kind in entry)
    assert seen


def test_class_with_disabled_torch_function_gives_plain_results() -> None:
    class Disabled(torch.Tensor):
        __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    tensor = torch.ones(2, device="cuda").as_subclass(Disabled)
    assert isinstance(tensor, Disabled)
    assert not isinstance(tensor + 1, Disabled)


def test_as_subclass_shares_the_memory() -> None:
    tensor = torch.ones(1024, device="cuda")
    before = torch.cuda.memory_allocated()
    view = tensor.as_subclass(Plain)
    assert torch.cuda.memory_allocated() == before
    assert view.data_ptr() == tensor.data_ptr()
    view.zero_()
    assert tensor.sum().item() == 0


def test_as_subclass_keeps_the_graph_and_make_subclass_leaves_it() -> None:
    weight = torch.ones(3, device="cuda", requires_grad=True)
    (weight.as_subclass(Plain) * 5).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [5, 5, 5]
    assert not Detached(weight).requires_grad


def test_as_subclass_of_tensor_ends_the_users_class() -> None:
    tensor = Plain(torch.ones(2, device="cuda")).as_subclass(torch.Tensor)
    assert not isinstance(tensor, Plain)
    assert tensor.is_cuda


def test_training_with_inputs_of_a_users_class_takes_the_same_memory() -> None:
    def peak(inputs: torch.Tensor) -> int:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 8)).cuda()
        torch.cuda.reset_peak_memory_stats()
        model(inputs.cuda()).sum().backward()
        return torch.cuda.max_memory_allocated()

    peak(torch.ones(64, 256))  # cuBLAS makes its workspace in the first product
    assert peak(torch.ones(64, 256).as_subclass(Plain)) == peak(torch.ones(64, 256))


def test_deepcopy_has_memory_and_attributes_of_its_own() -> None:
    class Copied(Tagged):
        def new_empty(self, *args: Any, **kwargs: Any) -> Any:
            return super().new_empty(*args, **kwargs).as_subclass(Copied)

    tensor = Copied(torch.ones(2, device="cuda"), tag=["a"])
    before = torch.cuda.memory_allocated()
    copied = copy.deepcopy(tensor)
    assert isinstance(copied, Copied)
    # A block for the storage, and one for the empty tensor of `new_empty`, of which `as_subclass` makes a view.
    assert torch.cuda.memory_allocated() - before == 2 * 512
    copied.tag.append("b")
    assert tensor.tag == ["a"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_deepcopy_refuses_a_class_that_new_empty_does_not_return(device: str) -> None:
    with pytest.raises(RuntimeError, match=r"subclass types that implement new_empty\(\)"):
        copy.deepcopy(Tagged(torch.ones(2, device=device), tag=["a"]))


def test_saved_tensor_is_loaded_with_class_and_attributes() -> None:
    file = io.BytesIO()
    torch.save(Tagged(torch.ones(2, 3, device="cuda"), tag=7), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert isinstance(loaded, Tagged)
    assert loaded.shape == (2, 3)
    assert loaded.tag == 7


def test_registry_of_subclasses_gets_the_users_classes_only() -> None:
    registered: list[type] = []

    class Registering(torch.Tensor):
        def __init_subclass__(cls, **options: Any) -> None:
            registered.append(cls)

    class Child(Registering):
        pass

    torch.ones(2, device="cuda").as_subclass(Child)
    assert registered == [Child]


def test_users_class_can_be_freed() -> None:
    class Short(torch.Tensor):
        pass

    reference = weakref.ref(Short)
    torch.ones(2, device="cuda").as_subclass(Short)
    del Short
    gc.collect()
    assert reference() is None


def test_constructors_of_cpu_tensors_work_beside_a_virtual_gpu() -> None:
    assert type(Plain(torch.ones(2))) is Plain
    assert Plain([1.0, 2.0]).tolist() == [1, 2]  # type: ignore[arg-type]
    assert torch.Tensor(2, 3).shape == (2, 3)


def test_type_of_a_plain_virtual_tensor_makes_plain_tensors() -> None:
    # fastai gives results the type of their inputs: on a real GPU both are torch.Tensor.
    on_gpu = torch.ones(2, device="cuda")
    on_cpu = torch.ones(2).as_subclass(type(on_gpu))
    assert type(on_cpu) is torch.Tensor
    assert torch.cat([on_cpu, on_cpu]).tolist() == [1, 1, 1, 1]
    assert on_gpu.as_subclass(type(on_gpu)).is_cuda


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_attributes_of_a_plain_tensor_are_the_users(device: str) -> None:
    # fastai and MONAI give the `__dict__` of one tensor to others, and pickle it.
    made_under_the_gpu = torch.nn.Linear(512, 1024).weight.detach()
    tensor = made_under_the_gpu.to(device)
    assert vars(tensor) == {}
    tensor.label = "cat"  # type: ignore[attr-defined]
    assert vars(tensor) == {"label": "cat"}
