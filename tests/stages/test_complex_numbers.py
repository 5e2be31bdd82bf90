"""Complex numbers of a model, as Meta's reference Llama uses them: pairs of real ones in its blocks."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (as everybody writes it)
from torch import nn

from hetpeer.bootstrap.model_checks.equivalence import check_likeness
from hetpeer.dht.base.errors import LocalError
from hetpeer.stages.tracing.cut import cut_blocks
from hetpeer.stages.tracing.trace import trace
from tests.amounts import mostly_proof
from tests.stages.split_run import assert_same_step, eager_step, split_step

pytestmark = pytest.mark.xdist_group("models")

LENGTH, WIDTH, HEADS = 12, 16, 2
HEAD = WIDTH // HEADS


def precompute_freqs_cis(dim, end, theta=10000.0):
    freqs = 1.0 / (theta ** (torch.arange(0, dim, 2)[: (dim // 2)].float() / dim))
    t = torch.arange(end, device=freqs.device, dtype=torch.float32)
    freqs = torch.outer(t, freqs)
    return torch.polar(torch.ones_like(freqs), freqs)


def apply_rotary_emb(xq, xk, freqs_cis):
    xq_ = torch.view_as_complex(xq.float().reshape(*xq.shape[:-1], -1, 2))
    xk_ = torch.view_as_complex(xk.float().reshape(*xk.shape[:-1], -1, 2))
    freqs_cis = freqs_cis.view(1, xq_.shape[1], 1, xq_.shape[3])
    xq_out = torch.view_as_real(xq_ * freqs_cis).flatten(3)
    xk_out = torch.view_as_real(xk_ * freqs_cis).flatten(3)
    return xq_out.type_as(xq), xk_out.type_as(xk)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, x, freqs_cis, mask):
        h = self.norm(x)
        xq, xk, xv = (w(h).view(*h.shape[:2], HEADS, HEAD) for w in (self.wq, self.wk, self.wv))
        xq, xk = apply_rotary_emb(xq, xk, freqs_cis)
        scores = xq.transpose(1, 2) @ xk.transpose(1, 2).transpose(2, 3) / HEAD**0.5 + mask
        out = F.softmax(scores.float(), dim=-1).type_as(xq) @ xv.transpose(1, 2)
        return x + self.wo(out.transpose(1, 2).flatten(2))


class Llama(nn.Module):
    """Meta's reference model; its table is an attribute, a buffer of either kind, or made in each forward."""

    def __init__(self, table):
        super().__init__()
        self.table = table
        self.embeddings, self.output = nn.Embedding(32, WIDTH), nn.Linear(WIDTH, 32)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        if table == "attribute":
            self.freqs_cis = precompute_freqs_cis(HEAD, 2 * LENGTH)
        elif table != "forward":
            freqs = precompute_freqs_cis(HEAD, 2 * LENGTH)
            self.register_buffer("freqs_cis", freqs, persistent=table == "persistent")

    def forward(self, tokens, targets):
        h = self.embeddings(tokens)
        freqs = precompute_freqs_cis(HEAD, 2 * LENGTH) if self.table == "forward" else self.freqs_cis
        freqs_cis = freqs.to(h.device)[0 : tokens.shape[1]]
        mask = torch.triu(torch.full((LENGTH, LENGTH), float("-inf")), diagonal=1)
        for layer in self.layers:
            h = layer(h, freqs_cis, mask)
        return F.cross_entropy(self.output(h).flatten(0, 1), targets.flatten())


def samples(count):
    tokens = torch.randint(0, 32, (count, LENGTH + 1))
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


@pytest.mark.parametrize(
    "table", mostly_proof(["persistent", "transient", "attribute", "forward"], ["persistent", "attribute"])
)
def test_complex_rotary_tables_are_trained_as_eager(table):
    torch.manual_seed(4)
    model, batches = Llama(table), [samples(4), samples(3)]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    dag = trace(model, batches[0])
    assert dag.dynamic
    blocks = cut_blocks(dag, at_least=3)
    assert all(len(block.outputs) == 1 for block in blocks)
    middle = len(blocks) // 2
    split = split_step(blocks, [(0, middle), (middle, len(blocks))], dag.tensors, batches)
    assert_same_step(split, eager_step(model, batches))
    check_likeness(model, batches[0], dag, blocks)
    kept = {name: {**dag.tensors, **dag.rest}[source] for name, source in dag.state_dict.items()}
    assert kept.keys() == before.keys()
    assert all(tensor.equal(before[name]) for name, tensor in kept.items())


class Calls(nn.Module):
    """Every operator on complex values that has a form in pairs."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4, 2))
        self.register_buffer("turn", torch.randn(4, dtype=torch.complex64))

    def forward(self, x):
        w = torch.view_as_complex(self.weight)
        z = torch.complex(x[:, None, :, 0], x[:, None, :, 1]) * w  # [batch, 3, 4]
        z = torch.cat([z, z.conj() * self.turn], dim=-1)[..., 1:]
        z = z.transpose(-1, -2).unsqueeze(-1) + (-z).permute(0, 2, 1).reshape(-1, 7, 3, 1)
        z = torch.stack([z * x.sum().abs(), z / 3.0], dim=-2).select(-2, 1).sum(dim=-1)
        z = z.to(torch.complex128).to(torch.complex64)[:, torch.tensor([0, 2])].expand(-1, 2, 3)
        return z.abs().mean() + z.real.square().mean() + z.imag.mean()


def test_operators_on_pairs_compute_what_complex_ones_do():
    torch.manual_seed(5)
    model, data = Calls(), {"x": torch.randn(4, 4, 2)}
    dag = trace(model, data)
    split = split_step(cut_blocks(dag, 1), [(0, 1)], dag.tensors, [data])
    assert_same_step(split, eager_step(model, [data]))


class Rooted(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 2))

    def forward(self, x):
        return torch.view_as_complex(self.weight * x).sqrt().abs().mean()


class ComplexParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, dtype=torch.complex64))

    def forward(self, x):
        return (self.weight * x[..., 0]).abs().mean()


@pytest.mark.parametrize(
    ("model", "code", "part"),
    [(Rooted, "HP-MODEL-001", "aten.sqrt.default"), (ComplexParameter, "HP-MODEL-003", "'weight'")],
)
def test_complex_numbers_without_a_form_in_pairs_are_refused(model, code, part):
    with pytest.raises(LocalError, match=code) as caught:
        trace(model(), {"x": torch.randn(4, 4, 2)})
    assert part in caught.value.what
    assert model is not Rooted or f"{__file__}:" in caught.value.why
