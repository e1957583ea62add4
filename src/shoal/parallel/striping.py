"""Tables: embeddings with sparse gradients, and how their rows are striped over servers. Pure.

A table's rows are cut into at most 64 stripes of neighbours, however many servers there are, and
stripes go to servers round-robin: so popular neighbouring rows are on several servers, a row's
number gives its server, and a checkpoint has few slices of each table.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shoal.parallel.layout import LocalLayout, Slice

MOST_STRIPES = 64
EmbeddingModule = nn.Embedding | nn.EmbeddingBag


def tables_of(model: nn.Module) -> dict[str, EmbeddingModule]:
    """The tables of a model that are trained, by the names of their weights."""
    return {
        f"{name}.weight".lstrip("."): module
        for name, module in model.named_modules()
        if isinstance(module, EmbeddingModule) and module.sparse and module.weight.requires_grad
    }


def weights_of(tables: Iterable[EmbeddingModule]) -> set[Tensor]:
    """To be left out where parameters are treated as a whole."""
    return {module.weight for module in tables}


class Striping(NamedTuple):
    """How the rows of one table are striped over servers."""

    num_rows: int
    num_servers: int

    @property
    def height(self) -> int:
        """The rows of a stripe; the last one may have fewer."""
        return max(1, -(-self.num_rows // MOST_STRIPES))

    def stripes_of(self, server: int) -> list[range]:
        """The rows that a server holds, one stripe after another."""
        starts = range(server * self.height, self.num_rows, self.num_servers * self.height)
        return [range(start, min(start + self.height, self.num_rows)) for start in starts]

    def servers_of(self, ids: Tensor) -> Tensor:
        """Who holds each of these rows."""
        return ids.div(self.height, rounding_mode="floor") % self.num_servers

    def places_of(self, ids: Tensor) -> Tensor:
        """Where rows stand among those of the server that holds them."""
        if self.num_servers == 1:
            return ids
        stripes = ids.div(self.height, rounding_mode="floor")
        within = stripes.div(self.num_servers, rounding_mode="floor") * self.height
        return within + ids % self.height


class Stripes(NamedTuple):
    """What a server holds of a table, in the form of a `Run`: whole rows, one after another."""

    name: str
    num_rows: int  # of the whole table
    stripes: Sequence[range]

    def parts(self, tensor: Tensor, holding: LocalLayout) -> list[Slice]:
        """A tensor with an entry for each of these rows, as parts of the logical one; views."""
        found, at = [], 0
        shape = (self.num_rows, *tensor.shape[1:])
        for stripe in self.stripes:
            part = tensor.detach()[at : at + len(stripe)]
            found.append(Slice(part, shape, (stripe.start, *[0] * (tensor.dim() - 1))))
            at += len(stripe)
        return found

    def row_parts(self, tensor: Tensor, holding: LocalLayout) -> list[Slice]:
        """The same of a tensor with one number for each row."""
        return self.parts(tensor, holding)


def sparse_rows(places: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """A gradient that is zero but for these rows, whose numbers rise."""
    return torch.sparse_coo_tensor(
        places[None], rows, (num_rows, *rows.shape[1:]), is_coalesced=True, check_invariants=False
    )
