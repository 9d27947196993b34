"""Sparse COO tensors: their memory is that of indices and values, as gradients of embeddings and in products."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from memexplore.recorder.recording import record
from memexplore.tape import Action
from memexplore.virtual_gpu.values.value_reads import NotSimulated
from tests.small import allocated, on_a_t4

ROWS, WIDTH, TAKEN = 100_000, 64, 512
VALUES, INDICES = TAKEN * WIDTH * 4, TAKEN * 8


@pytest.fixture(autouse=True)
def gpu() -> Iterator[Any]:
    yield from on_a_t4()


def words() -> torch.Tensor:
    return torch.randint(ROWS, (TAKEN,), device="cuda")


def test_the_gradient_of_a_sparse_embedding_is_as_large_as_the_batch() -> None:
    table, batch = nn.Embedding(ROWS, WIDTH, sparse=True).cuda(), words()
    before = allocated()
    table(batch).sum().backward()
    assert table.weight.grad.is_sparse
    # The indices are a copy of the batch.
    assert allocated() - before == VALUES + INDICES


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SparseAdam(p),
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.Adagrad(p, lr=0.1),
    ],
)
@pytest.mark.parametrize("layer", [nn.Embedding, nn.EmbeddingBag])
def test_optimizers_step_with_sparse_gradients(layer: Any, make: Callable[[Any], torch.optim.Optimizer]) -> None:
    table = layer(ROWS, WIDTH, sparse=True).cuda()
    optimizer = make(table.parameters())
    for _ in range(2):
        table(words().view(8, -1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    weight = ROWS * WIDTH * 4
    (state,) = optimizer.state.values() or [{}]
    states = sum(isinstance(value, torch.Tensor) and value.shape == table.weight.shape for value in state.values())
    assert allocated() == weight * (1 + states)


def test_sparse_adam_has_two_dense_states_and_makes_no_dense_temporary() -> None:
    table = nn.Embedding(ROWS, WIDTH, sparse=True).cuda()
    optimizer = torch.optim.SparseAdam(table.parameters())
    table(torch.arange(TAKEN, device="cuda")).sum().backward()
    optimizer.step()
    with record() as recording:
        optimizer.step()
    tape = recording.tape
    assert max(tape.size[tape.action == Action.ALLOC].tolist()) == VALUES


def test_coalescing_copies_indices_and_values_and_is_noted() -> None:
    unknown = torch.empty(1, TAKEN, dtype=torch.int64, device="cuda")
    gradient = torch.sparse_coo_tensor(unknown, torch.ones(TAKEN, WIDTH, device="cuda"), (ROWS, WIDTH))
    before = allocated()
    with record() as recording:
        coalesced = gradient.coalesce()
    assert allocated() - before == INDICES + VALUES
    assert (coalesced.is_coalesced(), coalesced.indices().shape, coalesced.values().shape) == (
        True,
        (1, TAKEN),
        (TAKEN, WIDTH),
    )
    assert any("coalesce finds no index twice" in note for note in recording.tape.meta.notes)


def matrix() -> torch.Tensor:
    """[[0, 0, 3], [-9, 0, 0]], whose first element of the second row has two entries."""
    indices = torch.tensor([[0, 1, 1], [2, 0, 0]], device="cuda")
    return torch.sparse_coo_tensor(indices, torch.tensor([3.0, 4.0, -13.0], device="cuda"), (2, 3))


def test_known_indices_are_coalesced_exactly() -> None:
    coalesced = matrix().coalesce()
    assert (coalesced.indices().tolist(), coalesced.values().tolist()) == ([[0, 1], [2, 0]], [3, -9])
    # 3 entries of 8 bytes for two dimensions; only the distinct ones keep a value.
    unknown = torch.empty(3, 1000, device="cuda")
    rows = torch.tensor([[5, 7, 5]], device="cuda")
    assert torch.sparse_coo_tensor(rows, unknown, (9, 1000)).coalesce().values().shape == (2, 1000)


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (lambda m: m.to_dense(), [[0, 0, 3], [-9, 0, 0]]),
        (lambda m: m.t().to_dense(), [[0, -9], [0, 0], [3, 0]]),
        (lambda m: torch.ones(2, 3, device="cuda") + m, [[1, 1, 4], [-8, 1, 1]]),
        (lambda m: torch.ones(2, 3, device="cuda").add_(m, alpha=2), [[1, 1, 7], [-17, 1, 1]]),
        (lambda m: torch.sparse.mm(m, torch.ones(3, 2, device="cuda")), [[3, 3], [-9, -9]]),
        (
            lambda m: torch.sparse.addmm(torch.ones(2, 1, device="cuda"), m, torch.ones(3, 1, device="cuda")),
            [[4], [-8]],
        ),
        (lambda m: (m * 2).to_dense(), [[0, 0, 6], [-18, 0, 0]]),
        (lambda m: m.abs().to_dense(), [[0, 0, 3], [9, 0, 0]]),
        (lambda m: m.pow(2).to_dense(), [[0, 0, 9], [81, 0, 0]]),
        (lambda m: torch.arange(6.0, device="cuda").view(2, 3).sparse_mask(m.coalesce()).values(), [2, 3]),
        (lambda m: torch.sparse.sum(m), -6),
        (lambda m: m.cpu().to_dense(), [[0, 0, 3], [-9, 0, 0]]),
        (lambda m: m.norm(1), 12),
    ],
)
def test_values_of_ops_on_known_sparse_matrices(run: Callable[[Any], torch.Tensor], expected: Any) -> None:
    assert run(matrix()).tolist() == expected


def test_a_dense_tensor_that_an_unknown_sparse_one_is_added_to_is_unknown() -> None:
    total = torch.zeros(ROWS, 1, device="cuda")[:4]
    total.add_(torch.sparse_coo_tensor(matrix()._indices()[:1], torch.empty(3, 1, device="cuda"), (4, 1)))
    assert "virtual" in repr(total)


def test_a_sparse_tensor_with_unknown_values_does_not_come_to_the_cpu() -> None:
    unknown = torch.sparse_coo_tensor(matrix()._indices(), torch.empty(3, device="cuda"), (2, 3))
    with pytest.raises(NotSimulated, match="cannot be copied to the CPU"):
        unknown.cpu()


def test_another_sparse_layout_says_so() -> None:
    with pytest.raises(NotSimulated, match=r"layout torch\.sparse_csr cannot be simulated"):
        torch.eye(3).to_sparse_csr().cuda()


@pytest.mark.parametrize("run", [lambda m: torch.sparse.sum(m, dim=0), lambda m: torch.norm(m, dim=0)])
def test_a_reduction_of_one_sparse_dimension_says_so(run: Callable[[Any], torch.Tensor]) -> None:
    with pytest.raises(NotSimulated, match="of a sparse tensor cannot be simulated"):
        run(matrix())


def test_gradients_of_two_batches_are_kept_side_by_side() -> None:
    table = nn.Embedding(ROWS, WIDTH, sparse=True).cuda()
    for _ in range(2):
        table(words()).sum().backward()
    assert table.weight.grad._nnz() == 2 * TAKEN


def test_a_sparse_matrix_of_the_cpu_multiplies_on_the_gpu() -> None:
    matrix = torch.sparse_coo_tensor(torch.tensor([[0, 1, 1], [2, 0, 2]]), torch.ones(3), (2, 3)).cuda()
    dense = torch.randn(3, 4, device="cuda", requires_grad=True)
    result = torch.sparse.mm(matrix, dense)
    result.sum().backward()
    assert (result.shape, dense.grad.shape, (matrix @ dense).shape) == ((2, 4), (3, 4), (2, 4))


def test_clones_and_copies_have_memory_of_their_own() -> None:
    matrix = torch.sparse_coo_tensor(words()[None], torch.ones(TAKEN, device="cuda"), (ROWS,))
    before = allocated()
    copied = matrix.clone()
    assert allocated() - before == INDICES + TAKEN * 4
    assert (copied * 2).to_dense().shape == (ROWS,)


def test_an_op_that_is_not_known_says_so() -> None:
    matrix = torch.sparse_coo_tensor(words()[None], torch.ones(TAKEN, device="cuda"), (ROWS,))
    with pytest.raises(NotSimulated, match="of a sparse tensor cannot be simulated"):
        matrix.log1p()
