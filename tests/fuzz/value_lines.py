"""Lines of the random programs of `value_programs.py`, as templates, and the functions that they call.

`{a}`, `{b}` and `{c}` stand for variables, `{known}` for one whose values are known, `{n}` for a small number, `{s}`
for a shape, `{t}` for a dtype. Memory without values holds `GARBAGE` in the CPU run, so that a virtual tensor that
counts it as known differs.
"""

from __future__ import annotations

import torch

GARBAGE = 0xA5
"""Byte of memory without values in the CPU run."""


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Return a tensor without values; those that a program leaves as they are count as 0 after its first write."""
    result = torch.empty(shape, dtype=dtype, device=device)
    if type(result) is torch.Tensor:
        result.zero_()
    return result


def empty_again(tensor: torch.Tensor) -> None:
    """Free a tensor's storage and allocate it again."""
    storage = tensor.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    storage.resize_(size)
    _spoil(tensor, 0)


def grow(tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Resize a tensor in place."""
    before = tensor.untyped_storage().nbytes()
    tensor.resize_(shape)
    _spoil(tensor, before)


def _spoil(tensor: torch.Tensor, begin: int) -> None:
    """Fill the storage of a CPU tensor with garbage from byte `begin` on."""
    if type(tensor) is torch.Tensor and tensor.untyped_storage().nbytes() > begin:
        torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())[begin:].fill_(GARBAGE)


def exchange(first: torch.Tensor, second: torch.Tensor) -> None:
    """Exchange the values of two tensors of one shape."""
    kept = first.clone()
    first.copy_(second)
    second.copy_(kept)


SHAPES = "(); (1,); (3,); (4,); (0,); (2, 3); (3, 3); (4, 4); (2, 3, 4); (12,)".split("; ")
DTYPES = "float32 float32 float32 float16 bfloat16 float64 int64 int64 int32 uint8 bool complex64".split()
MAKES = """
torch.arange({n}, dtype={t}, device=dev)
torch.zeros({s}, dtype={t}, device=dev)
torch.ones({s}, dtype={t}, device=dev)
torch.full({s}, {n}, dtype={t}, device=dev)
torch.eye({n}, dtype={t}, device=dev)
torch.linspace(-2, 3, {n}, dtype={t}, device=dev)
torch.tensor([{n}, -{n}, 7], dtype={t}, device=dev)
torch.tensor([{n}, 2, 7], dtype={t}).to(dev)
torch.randint(0, 5, {s}, device=dev, generator=g.manual_seed({seed})).to({t})
torch.randn({s}, device=dev, generator=g.manual_seed({seed})).to({t})
torch.rand({s}, device=dev, generator=g.manual_seed({seed}))
torch.randperm({n}, device=dev, generator=g.manual_seed({seed}))
empty({s}, {t}, dev)
empty({s}, {t}, dev)
""".strip().splitlines()
VIEWS = """
{a}.detach()
{a}
{a}.data
{a}.t()
{a}.view(-1)
{a}.unsqueeze(0)
{a}.expand(2, *{a}.shape)
{a}[:2]
{a}[..., 1:]
{a}[1]
{a}[::2]
{a}.chunk(2)[1]
{a}.transpose(0, -1)
{a}.diagonal()
{a}.view(torch.uint8)
{a}.view(torch.int32)
{a}.view(torch.float32)
{a}.narrow(0, 1, 2)
{a}.squeeze()
{a}.unfold(0, 2, 1)
{a}.as_strided((2,), (1,), 1)
{a}.as_strided((2, 2), (1, 2))
torch.view_as_real({a})
{a}.conj()
{a}.imag
{a}.real
{a}.view(2, -1)
{a}.movedim(0, -1)
{a}.view_as({b})
{a}.swapaxes(0, 1)
{a}.unbind(0)[0]
{a}.split(1)[-1]
{a}.expand_as({b})
{a}.broadcast_to(3, 3)
{a}.alias_copy() if hasattr({a}, "alias_copy") else {a}
""".strip().splitlines()
OPS = """
{a}.clone()
{a}.contiguous()
{a}.reshape(-1)
{a}.reshape({b}.shape)
{a}.float()
{a}.half()
{a}.to(torch.int64)
{a}.to({t})
{a}.cpu().clone().to(dev)
{a}.cuda() if dev == "cuda" else {a}
{a} + {b}
{a} - {b}
{a} * {b}
{a} / {b}
{a} // {b}
{a} % 3
{a} ** 2
{a} @ {b}
-{a}
~{a}
{a} == {b}
{a} < {b}
{a} & {b}
{a} ^ 1
{a}.abs()
{a}.exp()
{a}.sum()
{a}.sum(0)
{a}.sum(-1, keepdim=True)
{a}.mean()
{a}.mean(0, keepdim=True)
{a}.max()
{a}.max(0).indices
{a}.min(-1).values
{a}.argmax()
{a}.argsort()
{a}.sort(-1, descending=True).values
{a}.cumsum(0)
{a}.prod()
{a}.std()
{a}.norm()
{a}.any()
{a}.all(0)
{a}.topk(2).indices
{a}.nonzero()
{a}.unique()
{a}.bincount()
{a}.softmax(0)
{a}.flip(0)
{a}.roll(1)
{a}.tril()
{a}.repeat(2)
{a}.repeat_interleave(2)
{a}.new_zeros(3)
{a}.new_full((2,), {n})
{a}.new_tensor([{n}, 2])
torch.zeros_like({a})
torch.full_like({a}, {n})
torch.ones_like({a}, dtype={t})
torch.empty_like({a}).fill_({n})
torch.where({a} > 0, {a}, {b})
torch.where({a}.bool(), {n}, {b})
torch.cat([{a}, {b}])
torch.cat([{a}, {a}])
torch.stack([{a}, {b}])
torch.maximum({a}, {b})
torch.minimum({a}, {b})
torch.outer({a}, {b})
torch.addcmul({a}, {b}, {b}, value=0.5)
torch.lerp({a}, {b}, 0.5)
{a}[[0, 0]]
{a}[torch.tensor([0, 1], device=dev)]
{a}[{a} > 1]
{a}[{b}.long() % {a}.shape[0]]
{a}.index_select(0, torch.tensor([0, 0], device=dev))
{a}.gather(0, {b}.long().abs() % {a}.shape[0])
{a}.take({b}.long() % {a}.numel())
{a}.masked_select({b} > 0)
{a}.masked_fill({a} > 0, {n})
{a}.scatter(0, {b}.long().abs() % {a}.shape[0], {n})
{a}.scatter_add(0, {b}.long().abs() % {a}.shape[0], {a})
{a}.index_put((torch.tensor([0, 0], device=dev),), torch.tensor({n}, dtype={a}.dtype, device=dev), accumulate=True)
{a}.index_add(0, torch.tensor([0, 0], device=dev), {a}[:2])
{a}.index_copy(0, torch.tensor([1], device=dev), {a}[:1])
{a}.clamp(-1, 2)
{a}.sigmoid()
torch.bucketize({a}, torch.tensor([0, 2, 4], device=dev))
torch.searchsorted(torch.tensor([0, 2, 4], device=dev), {a})
functional.one_hot({a}.long() % 3)
functional.relu({a})
functional.pad({a}, (1, 1))
functional.layer_norm({a}, {a}.shape[-1:])
functional.gelu({a})
functional.linear({a}, {b})
functional.mse_loss({a}, {b})
functional.cross_entropy({a}, {b}.long() % 3)
functional.log_softmax({a}, -1)
functional.embedding({a}.long().abs() % 3, torch.arange(6., device=dev).view(3, 2))
functional.dropout({a}, 0.0)
torch.bernoulli(({a} > 0).float() * 0.5, generator=g.manual_seed({seed}))
torch.multinomial({a}.float().abs() + 1, 1, generator=g.manual_seed({seed}))
torch.normal({a}.float(), 1.0, generator=g.manual_seed({seed}))
torch.complex({a}, {b})
torch.isfinite({a})
torch.histc({a}, 4)
torch._foreach_add([{a}, {b}], 1)[1]
torch._foreach_mul([{a}, {b}], [{b}, {a}])[0]
torch.unbind({a} + 1)[0]
torch.split({a} * 2, 1)[0]
torch.aminmax({a}).max
torch.meshgrid({a}, {b}, indexing="ij")[0]
torch.einsum("i,i->", {a}, {b})
torch.tensor({known}.tolist(), device=dev)
torch.full((2,), {known}.sum().item(), device=dev)
copy.deepcopy({a})
copy.copy({a})
torch.linalg.inv({a})
torch.nan_to_num({a})
torch.utils.checkpoint.checkpoint(lambda x: (x * x).sin(), {a}, use_reentrant=False)
""".strip().splitlines()
WRITES = """
{a}.zero_()
{a}.fill_({n})
{a}.fill_({b}[0])
{a}.add_({b})
{a}.add_(1)
{a}.mul_({b})
{a}.sub_({b}, alpha=2)
{a}.div_(2)
{a}.neg_()
{a}.copy_({b})
{a}.copy_({b})
{a}.copy_({a}.flip(0))
{a}.copy_({b}.cpu())
{a}.copy_(torch.arange({n}))
{a}[0] = {n}
{a}[0] = {b}
{a}[..., -1] = {b}
{a}[{a} > 1] = {n}
{a}[{b} > 1] = {b}[0]
{a}[torch.tensor([0, 0, 1], device=dev)] = torch.tensor([5, 6, 7], device=dev).to({a}.dtype)
{a}.view(-1)[torch.tensor([1, 0, 1], device=dev)] += 1
{a}[:] = {b}
{a} += {b}
{a} *= 2
{a}.t_()
{a}.unsqueeze_(0)
{a}.squeeze_()
{a}.transpose_(0, -1)
{a}.detach_()
{a}.requires_grad_()
{a}.requires_grad_(False)
grow({a}, (6,))
{a}.resize_(2)
{a}.resize_as_({b})
{a}.set_({b})
{a}.set_()
{a}.set_({b}.untyped_storage(), 0, (2,), (1,))
{a}.data = {b}
{a}.data = {b}.data
{a}.data = {a}.data.clone()
{a}.data.add_(1)
{a}.detach().mul_(3)
empty_again({a})
{a}.untyped_storage().resize_({a}.untyped_storage().nbytes() + 16)
{a}.untyped_storage().fill_({n})
{a}.untyped_storage().copy_({b}.untyped_storage())
{a}.masked_fill_({b} > 0, {n})
{a}.masked_scatter_({a} > 0, {b})
{a}.scatter_(0, {b}.long().abs() % {a}.shape[0], {n})
{a}.scatter_reduce_(0, {b}.long().abs() % {a}.shape[0], {a}.clone(), "amax")
{a}.index_fill_(0, torch.tensor([0], device=dev), {n})
{a}.index_put_((torch.tensor([0, 1, 0], device=dev),), torch.ones(3, dtype={a}.dtype, device=dev), accumulate=True)
{a}.index_copy_(0, torch.tensor([0, 0], device=dev), {b}[:2])
{a}.put_(torch.tensor([0, 0], device=dev), torch.tensor([3, 4], dtype={a}.dtype, device=dev))
{a}.clamp_(max=2)
{a}.relu_()
{a}.sqrt_()
{a}.cumsum_(0)
{a}.sort(0, out=({b}, {c}))
{a}.max(0, out=({b}, {c}))
torch.add({a}, {b}, out={c})
torch.add({a}, 1, out={a})
torch.mul({a}, {b}, out={a})
torch.cat([{a}, {b}], out={c})
torch.matmul({a}.clone(), {b}.clone(), out={c})
torch.where({a} > 0, {a}, {b}, out={c})
torch.sum({a}, 0, out={b})
torch.cumsum({a}, 0, out={a})
torch.index_select({a}, 0, torch.tensor([0, 0], device=dev), out={c})
torch.gather({a}, 0, {b}, out={c})
torch.stack([{a}, {b}], out={c})
torch.nonzero({a}, out={b})
torch.full((3,), {n}, out={a})
torch.unique({a}, sorted=True)
torch._foreach_add_([{a}, {b}], 1)
torch._foreach_copy_([{a}, {b}], [{b}, {c}])
torch._foreach_zero_([{a}, {c}])
torch._foreach_mul_([{a}, {c}], [{b}, {b}])
{a}.bernoulli_(0.5, generator=g.manual_seed({seed}))
{a}.normal_(generator=g.manual_seed({seed}))
{a}.uniform_(generator=g.manual_seed({seed}))
{a}.random_(0, 9, generator=g.manual_seed({seed}))
{a}.exponential_(generator=g.manual_seed({seed}))
exchange({a}, {b})
{a}.swapaxes_(0, 1)
{a}.fill_diagonal_({n})
{a}.triu_()
{a}.diagonal().fill_({n})
{a}.view(torch.uint8)[:1].fill_(3)
{a}.imag.zero_()
{a}.conj().imag.add_(1)
({a} * 1.0).sum().backward()
({a} * {b}).sum().backward()
({a}[0] + {a}).sum().backward()
{a}.sum().backward()
{a}.grad = None
{a}.grad = {b}
{a}.grad.mul_(2)
{a}.grad.zero_()
torch.autograd.backward([{a}.sum(), {b}.sum()])
torch.nn.init.constant_({a}, {n})
torch.nn.utils.clip_grad_norm_([{a}, {b}], 1.0)
torch.optim.SGD([{a}], 0.1).step()
torch.optim.Adam([{a}], 0.1, foreach=True).step()
torch.utils.swap_tensors({a}, {b})
functional.batch_norm({a}, {b}, {c}, training=True)
functional.relu({a}, inplace=True)
""".strip().splitlines()
TAKES = "{a}.grad", "{a}._base", "torch.nn.Parameter({a})", "{a}.grad.detach()"
