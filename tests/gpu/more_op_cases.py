"""Cases of single ops beside those of op_cases.py: indices, sorting, linear algebra, transforms, losses, layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.gpu.op_cases import BFLOAT, HALF, add, cases, indices, values

__all__ = ["cases"]


def _with_gradient(x):
    weight = nn.Parameter(x.clone())
    weight.grad = x.clone()
    return weight


for dt, n in ((torch.float32, "f32"), (HALF, "f16"), (BFLOAT, "bf16")):
    add(f"embedding {n}", lambda w, i: F.embedding(i, w), values(30000, 256, dt=dt), indices(30000, 16, 128))
    add(
        f"embedding pad {n}",
        lambda w, i: F.embedding(i, w, padding_idx=0),
        values(30000, 256, dt=dt),
        indices(30000, 64, 512),
    )
    add(f"embedding small {n}", lambda w, i: F.embedding(i, w), values(512, 64, dt=dt), indices(512, 8, 100))
    add(
        f"embedding scale {n}",
        lambda w, i: F.embedding(i, w, scale_grad_by_freq=True),
        values(3000, 64, dt=dt),
        indices(3000, 64, 100),
    )
    add(f"embedding_bag {n}", lambda w, i: F.embedding_bag(i, w), values(30000, 64, dt=dt), indices(30000, 128, 20))
    add(
        f"embedding_bag max {n}",
        lambda w, i: F.embedding_bag(i, w, mode="max"),
        values(30000, 64, dt=dt),
        indices(30000, 128, 20),
    )
    add(f"index_select {n}", lambda w, i: w.index_select(0, i), values(30000, 64, dt=dt), indices(30000, 5000))
    add(f"index {n}", lambda w, i: w[i], values(30000, 64, dt=dt), indices(30000, 5000))
    add(f"index2 {n}", lambda w, i, j: w[i, j], values(3000, 640, dt=dt), indices(3000, 5000), indices(640, 5000))
    add(f"gather {n}", lambda w, i: w.gather(1, i), values(3000, 640, dt=dt), indices(640, 3000, 16))
    add(
        f"scatter_add {n}",
        lambda w, i: torch.zeros(3000, 640, device=w.device, dtype=w.dtype).scatter_add(1, i, w),
        values(3000, 16, dt=dt),
        indices(640, 3000, 16),
    )
    add(
        f"index_add {n}",
        lambda w, i: torch.zeros(300, 64, device=w.device, dtype=w.dtype).index_add(0, i, w),
        values(5000, 64, dt=dt),
        indices(300, 5000),
    )
    add(
        f"index_put acc {n}",
        lambda w, i: torch.zeros(300, 64, device=w.device, dtype=w.dtype).index_put((i,), w, accumulate=True),
        values(5000, 64, dt=dt),
        indices(300, 5000),
    )
    add(
        f"scatter_reduce {n}",
        lambda w, i: torch.zeros(3000, 640, device=w.device, dtype=w.dtype).scatter_reduce(1, i, w, "amax"),
        values(3000, 16, dt=dt),
        indices(640, 3000, 16),
    )
    add(f"roll {n}", lambda x: x.roll((3, 3), (1, 2)), values(8, 56, 56, 96, dt=dt))
    add(f"flip {n}", lambda x: x.flip(-1), values(8, 56, 56, 96, dt=dt))
    add(f"cat {n}", lambda x, y: torch.cat([x, y], 1), values(8, 64, 56, 56, dt=dt), values(8, 32, 56, 56, dt=dt))
    add(f"stack {n}", lambda x, y: torch.stack([x, y]), values(8, 64, 56, 56, dt=dt), values(8, 64, 56, 56, dt=dt))
    add(f"unfold {n}", lambda x: F.unfold(x, 3, padding=1), values(4, 32, 64, 64, dt=dt))
    add(f"fold {n}", lambda x: F.fold(x, (64, 64), 3, padding=1), values(4, 32 * 9, 4096, dt=dt))
    add(
        f"grid_sample {n}",
        lambda x: F.grid_sample(x, torch.zeros(4, 32, 32, 2, device=x.device, dtype=x.dtype), align_corners=False),
        values(4, 32, 64, 64, dt=dt),
    )
    add(f"cdist {n}", lambda x, y: torch.cdist(x.float(), y.float()), values(1000, 64, dt=dt), values(1200, 64, dt=dt))
    add(
        f"baddbmm {n}",
        lambda x, y: torch.baddbmm(torch.zeros(1, device=x.device, dtype=x.dtype), x, y),
        values(16, 128, 64, dt=dt),
        values(16, 64, 128, dt=dt),
    )
    add(
        f"addmm {n}",
        lambda b, x, y: torch.addmm(b, x, y),
        values(512, dt=dt),
        values(256, 128, dt=dt),
        values(128, 512, dt=dt),
    )
    add(f"multinomial {n}", lambda x: torch.multinomial(x.softmax(-1).float(), 4), values(64, 5000, dt=dt, g=False))
    add(f"masked_fill {n}", lambda x: x.masked_fill(x > 0, -1e4), values(8, 12, 256, 256, dt=dt))
    add(f"tril {n}", lambda x: x.tril(), values(8, 256, 256, dt=dt))
    add(
        f"clip_grad {n}",
        lambda x: nn.utils.clip_grad_norm_([_with_gradient(x)], 1.0),
        values(1000, 1000, dt=dt, g=False),
    )
add("nonzero", lambda x: (x > 0).nonzero(), values(1000, 1000, g=False))
add("masked_select", lambda x: x[x > 0], values(1000, 1000))
add("unique", lambda i: i.unique(), indices(1000, 100000))
add("unique inverse", lambda i: i.unique(return_inverse=True, return_counts=True)[0], indices(1000, 100000))
add("unique dim", lambda i: i.unique(dim=0), indices(3, 1000, 4))
add("unique_consecutive", lambda i: i.unique_consecutive(), indices(3, 10000))
add("bincount", lambda i: i.bincount(minlength=1000), indices(1000, 100000))
add("histc", lambda x: torch.histc(x, 100), values(100000, g=False))
add("randperm", lambda x: torch.randperm(100000, device=x.device), values(1, g=False))
add("randperm small", lambda x: torch.randperm(1000, device=x.device), values(1, g=False))
add("argsort", lambda i: i.argsort(), indices(1000, 100000))
add("sort long", lambda i: i.sort()[0], indices(1000, 100000))
add("argsort 2d", lambda i: i.argsort(-1), indices(1000, 64, 3000))
add("searchsorted", lambda x: torch.searchsorted(x.sort()[0].detach(), x), values(10000, g=False))
add("bucketize", lambda x: torch.bucketize(x, torch.linspace(-1, 1, 100, device=x.device)), values(10000, g=False))
add("isin", lambda i, j: torch.isin(i, j), indices(1000, 10000), indices(1000, 100))
add("isin small", lambda i, j: torch.isin(i, j), indices(1000, 10000), indices(1000, 5))
add("one_hot", lambda i: F.one_hot(i, 1000), indices(1000, 5000))
add("repeat_interleave", lambda x, i: x.repeat_interleave(i, 0), values(1000, 64), indices(4, 1000))
add("cumsum long", lambda i: i.cumsum(0), indices(4, 100000))
add("cumsum long 2d", lambda i: i.cumsum(-1), indices(4, 64, 1000))
add("cummax", lambda x: x.cummax(-1)[0], values(64, 1000))
add("diff", lambda x: x.diff(), values(64, 1000))
for n_ in (3, 16, 64, 256, 1000):

    def sq(d, n_=n_):
        return (
            (lambda a: a @ a.T + n_ * torch.eye(n_))(torch.randn(n_, n_, generator=torch.Generator().manual_seed(1)))
            .to(d)
            .requires_grad_()
        )

    add(f"cholesky {n_}", lambda a: torch.linalg.cholesky(a), sq)
    add(f"inv {n_}", lambda a: torch.linalg.inv(a), sq)
    add(f"solve {n_}", lambda a: torch.linalg.solve(a, torch.ones(a.shape[0], 3, device=a.device)), sq)
    add(f"det {n_}", lambda a: torch.linalg.det(a), sq)
    add(f"slogdet {n_}", lambda a: torch.linalg.slogdet(a)[1], sq)
    add(f"svd {n_}", lambda a: torch.linalg.svd(a)[1], sq)
    add(f"svdvals {n_}", lambda a: torch.linalg.svdvals(a), sq)
    add(f"eigh {n_}", lambda a: torch.linalg.eigh(a)[0], sq)
    add(f"eigvals {n_}", lambda a: torch.linalg.eigvals(a.detach()), sq)
    add(f"qr {n_}", lambda a: torch.linalg.qr(a)[0], sq)
    add(f"pinv {n_}", lambda a: torch.linalg.pinv(a), sq)
    add(f"matrix_exp {n_}", lambda a: torch.matrix_exp(a / 1000), sq)
    add(
        f"triangular {n_}",
        lambda a: torch.linalg.solve_triangular(a.tril(), torch.ones(a.shape[0], 3, device=a.device), upper=False),
        sq,
    )
    add(
        f"cholesky_solve {n_}",
        lambda a: torch.cholesky_solve(torch.ones(a.shape[0], 3, device=a.device), torch.linalg.cholesky(a)),
        sq,
    )
    add(f"lu_factor {n_}", lambda a: torch.linalg.lu_factor(a)[0], sq)
    add(f"matrix_norm {n_}", lambda a: torch.linalg.matrix_norm(a, 2), sq)
    if n_ <= 64:

        def bsq(d, sq=sq):
            return sq(d).detach()[None].repeat(32, 1, 1).requires_grad_()

        for nm, fn in (
            ("cholesky", torch.linalg.cholesky),
            ("inv", torch.linalg.inv),
            ("det", torch.linalg.det),
            ("svdvals", torch.linalg.svdvals),
            ("eigh", lambda a: torch.linalg.eigh(a)[0]),
            ("qr", lambda a: torch.linalg.qr(a)[0]),
            ("solve", lambda a: torch.linalg.solve(a, a.detach())),
        ):
            add(f"batched {nm} {n_}", fn, bsq)
for shape in ((16, 1000), (16, 1024), (4, 3, 224, 224), (8, 16000), (2, 64, 64, 64)):
    s = "x".join(map(str, shape))
    add(f"fft {s}", lambda x: torch.fft.fft(x).abs(), values(*shape))
    add(f"rfft {s}", lambda x: torch.fft.rfft(x).abs(), values(*shape))
    add(f"fft2 {s}", lambda x: torch.fft.fft2(x).abs(), values(*shape))
    add(f"irfft {s}", lambda x: torch.fft.irfft(torch.fft.rfft(x)), values(*shape))
    add(f"rfft2 irfft2 {s}", lambda x: torch.fft.irfft2(torch.fft.rfft2(x)), values(*shape))
add(
    "stft",
    lambda x: torch.stft(x, 400, 160, window=torch.hann_window(400, device=x.device), return_complex=True).abs(),
    values(8, 16000),
)
add(
    "istft",
    lambda x: torch.istft(
        torch.stft(x, 400, 160, window=torch.hann_window(400, device=x.device), return_complex=True),
        400,
        160,
        window=torch.hann_window(400, device=x.device),
    ),
    values(8, 16000),
)
add(
    "ctc",
    lambda x: F.ctc_loss(
        x.log_softmax(-1),
        torch.ones(16, 20, dtype=torch.long, device=x.device),
        torch.full((16,), 100),
        torch.full((16,), 20),
    ),
    values(100, 16, 40),
)
add(
    "ctc cuda lengths",
    lambda x: F.ctc_loss(
        x.log_softmax(-1),
        torch.ones(16, 20, dtype=torch.long, device=x.device),
        torch.full((16,), 100, device=x.device),
        torch.full((16,), 20, device=x.device),
    ),
    values(100, 16, 40),
)
add(
    "nll2d",
    lambda x: F.cross_entropy(x, torch.zeros(4, 64, 64, dtype=torch.long, device=x.device)),
    values(4, 21, 64, 64),
)
add("sparse mm", lambda x: torch.sparse.mm(torch.eye(1000, device=x.device).to_sparse(), x), values(1000, 64))
add("embedding sparse", lambda w, i: F.embedding(i, w, sparse=True), values(30000, 64), indices(30000, 16, 128))
add("nested pad", lambda x: nn.utils.rnn.pad_sequence([x[:3], x[:7], x]), values(20, 64))
add(
    "pack",
    lambda x: nn.utils.rnn.pack_padded_sequence(x, torch.tensor([20, 15, 10, 5]), enforce_sorted=True).data,
    values(20, 4, 64),
)
add("bilinear", lambda x, y, w: F.bilinear(x, y, w), values(64, 32), values(64, 48), values(16, 32, 48))
add("max_unpool", lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), values(4, 16, 64, 64))
add("lp_pool", lambda x: F.lp_pool2d(x, 2, 2), values(4, 16, 64, 64))
add("adaptive max", lambda x: F.adaptive_max_pool2d(x, 3), values(4, 16, 64, 64))
add("maxpool3d", lambda x: F.max_pool3d(x, 2), values(2, 16, 16, 32, 32))
add("maxpool1d", lambda x: F.max_pool1d(x, 2), values(4, 16, 1000))
add("trilinear", lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"), values(2, 16, 8, 16, 16))
add("bicubic", lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), values(2, 16, 32, 32))
add("prelu", lambda x, w: F.prelu(x, w), values(4, 16, 64, 64), values(16))
add("rrelu", lambda x: F.rrelu(x, training=True), values(4, 16, 64, 64))
add(
    "multi_margin",
    lambda x: F.multi_margin_loss(x, torch.zeros(64, dtype=torch.long, device=x.device)),
    values(64, 100),
)
add("triplet", lambda x, y: F.triplet_margin_loss(x, y, y.detach() * 2), values(64, 128), values(64, 128))
add("gumbel", lambda x: F.gumbel_softmax(x, hard=True), values(64, 128))
add("poisson", lambda x: F.poisson_nll_loss(x, x.detach().exp()), values(64, 128))
add("huber", lambda x: F.huber_loss(x, x.detach() * 2), values(64, 128))
add("pdist", lambda x: F.pdist(x), values(500, 64))
add("cov", lambda x: x.cov(), values(64, 500))
add("corrcoef", lambda x: x.corrcoef(), values(64, 500))
add("kron", lambda x, y: torch.kron(x, y), values(16, 16), values(8, 8))
add("trapz", lambda x: torch.trapezoid(x), values(64, 500))
add("cross", lambda x, y: torch.linalg.cross(x, y), values(64, 3), values(64, 3))
add("renorm", lambda x: x.renorm(2, 0, 1.0), values(64, 500))
add("quantile", lambda x: x.quantile(0.5), values(64, 500))
add("nanmedian", lambda x: x.nanmedian(), values(64, 500))
add("allclose", lambda x: torch.tensor(torch.allclose(x, x)), values(64, 500, g=False))
add("equal", lambda x: torch.tensor(torch.equal(x, x)), values(64, 500, g=False))
add("bernoulli", lambda x: torch.bernoulli(x.sigmoid()), values(64, 500, g=False))
add("normal", lambda x: torch.normal(x, 1.0), values(64, 500, g=False))
add("complex mm", lambda x: (torch.complex(x, x) @ torch.complex(x, x).mH).abs(), values(64, 500))
add("householder", lambda x: torch.linalg.householder_product(x, torch.ones(8, device=x.device)), values(64, 8))
add(
    "lstm cell",
    lambda x, h, w, u: torch.lstm_cell(x, (h, h), w, u)[0],
    values(64, 128),
    values(64, 256),
    values(1024, 128),
    values(1024, 256),
)
add(
    "gru cell",
    lambda x, h, w, u: torch.gru_cell(x, h, w, u),
    values(64, 128),
    values(64, 256),
    values(768, 128),
    values(768, 256),
)
add(
    "lstm cell biases",
    lambda x, h, w, u, b: torch.lstm_cell(x, (h, h), w, u, b, b)[0],
    values(64, 128),
    values(64, 256),
    values(1024, 128),
    values(1024, 256),
    values(1024),
)
add("weight_norm", lambda v, g: torch._weight_norm(v, g, 0), values(256, 128), values(256, 1))
add(
    "spectral",
    lambda w: nn.utils.parametrizations.spectral_norm(_lin(w))(torch.ones(4, 128, device=w.device)),
    values(256, 128, g=False),
)


def _lin(w):
    return nn.Linear(128, 256).to(w.device)
