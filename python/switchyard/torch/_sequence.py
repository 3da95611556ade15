# SPDX-License-Identifier: Apache-2.0
"""Sequences cut over ranks into pieces of uneven length, without padded tokens."""
import operator

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from .._library import InvalidArgument
from ._functions import first_order
from ._process_group import group_of

_MOST = 2**63 - 1  # the largest size in torch
_ADJOINTS = ("slice", "sum")


class SequenceShard:
    """The tokens of rank `rank` of `size`, when each of `batch` sequences of `length` tokens is cut
    into pieces of padded_length. The last pieces may be shorter, or empty.

    13 tokens over 4 ranks make pieces of 4, 4, 4 and 1, and 5 tokens make 2, 2, 1 and 0, as torch's
    Shard cuts them. Local token (b, i) is token offset + i of sequence b.
    """

    def __init__(self, batch, length, size, rank):
        self.batch, self.length, self.size, self.rank = map(operator.index,
                                                            (batch, length, size, rank))
        if batch < 0 or length < 0:
            raise InvalidArgument(f"batch ({batch}) and length ({length}) must not be negative")
        if size < 1 or not 0 <= rank < size:
            raise InvalidArgument(f"size ({size}) must be positive, and rank ({rank}) must be 0 to "
                                  f"{size - 1}")
        if max(batch, 1) * (length + size - 1) > _MOST:
            raise InvalidArgument(f"batch ({batch}) sequences of length ({length}) over size "
                                  f"({size}) ranks have more tokens than 64 bits can count")

    @classmethod
    def of(cls, x):
        """Returns the shard of a DTensor x [batch, length, …] that one dimension of its mesh shards
        along the sequence. The batch is this rank's part of it."""
        return cls._found(x)[0]

    @classmethod
    def _found(cls, x):
        """Returns the shard, and the dimension of the mesh."""
        found = [d for d, placement in enumerate(x.placements)
                 if type(placement) is Shard and placement.dim % x.dim() == 1]
        if len(found) != 1 or any(placement.is_partial() for placement in x.placements):
            raise InvalidArgument(f"a DTensor {list(x.shape)} is placed {x.placements}, but "
                                  "exactly one placement must be Shard(1), and none partial")
        mesh = x.device_mesh
        shard = cls(x._local_tensor.shape[0], x.shape[1], mesh.size(found[0]),
                    mesh.get_local_rank(found[0]))
        return shard, found[0]

    @property
    def padded_length(self):
        """ceil(length / size), the same on every rank."""
        return -(-self.length // self.size)

    @property
    def offset(self):
        """The first token of the piece; at most length."""
        return self.offset_of(self.rank)

    @property
    def count(self):
        """The number of tokens of the piece; may be 0."""
        return self.count_of(self.rank)

    @property
    def num_tokens(self):
        """The number of tokens of this rank: batch · count."""
        return self.batch * self.count

    def offset_of(self, rank):
        return min(rank * self.padded_length, self.length)

    def count_of(self, rank):
        return min(self.padded_length, self.length - self.offset_of(rank))

    def cut(self, x):
        """Returns this rank's piece [batch, count, …] of x [batch, length, …], which every rank
        has.

        The piece is a view. Its gradient is 0 outside of the piece, so each rank contributes a part
        of the gradient of x. A DTensor gives its local piece, and receives the whole gradient.
        """
        if isinstance(x, DTensor):
            return self._local(x)
        self._require(x, "x", self.length)
        return x[:, self.offset:self.offset + self.count]

    def cut_tokens(self, x):
        """Like cut(), but returns tokens [batch · count, …], as layers take them."""
        return self.cut(x).flatten(0, 1)

    def gather(self, local, group=None, *, backward):
        """Returns the whole sequence [batch, length, …], from local [batch, count, …] on every rank
        of `group`. Collective; a DTensor brings its own group.

        `backward` selects how a gradient comes back. It has no default, because the wrong choice
        scales gradients by `size`. Use "slice" if what follows is replicated: every rank has the
        whole gradient and takes its slice. Use "sum" if every rank does something else: their
        gradients are parts, which are added in rank order, in f32.
        """
        if backward not in _ADJOINTS:
            raise InvalidArgument(f"backward is {backward!r}, but must be 'slice', where what "
                                  "follows is replicated, or 'sum', where it is not")
        if isinstance(local, DTensor):
            group = local.device_mesh.get_group(self._found(local)[1]) if group is None else group
            local = self._local(local)
        self._require(local, "local", self.count)
        return _Gather.apply(local, self, self._require_ranks(group), backward)

    def gather_tokens(self, tokens, group=None, *, backward):
        """Like gather(), but takes tokens [batch · count, …], as layers return them."""
        if tokens.dim() < 1 or tokens.shape[0] != self.num_tokens:
            raise InvalidArgument(f"tokens is {list(tokens.shape)}, but the shard has {self.batch} "
                                  f"x {self.count} tokens")
        return self.gather(tokens.unflatten(0, (self.batch, self.count)), group, backward=backward)

    def to_dtensor(self, local, mesh):
        """Returns local [batch, count, …] as a DTensor [batch, length, …], Shard(1) over `mesh`, a
        one-dimensional DeviceMesh. Sends nothing."""
        self._require(local, "local", self.count)
        self._require_ranks(mesh)
        shape = torch.Size((self.batch, self.length, *local.shape[2:]))
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(local.contiguous(), mesh, [Shard(1)], run_check=False,
                                  shape=shape, stride=stride)

    def _local(self, x):
        """Returns this rank's piece of a DTensor that is sharded along the sequence, or
        replicated."""
        if x.placements == (Replicate(),):
            x = x.redistribute(placements=[Shard(1)])
        found = self.of(x)
        if vars(found) != vars(self):
            raise InvalidArgument(f"the DTensor is {found}, but the shard is {self}")
        return x.to_local()

    def _require_ranks(self, ranks):
        group = group_of(ranks)
        if (group.size(), group.rank()) != (self.size, self.rank):
            raise InvalidArgument(f"the shard is rank {self.rank} of {self.size}, but this is rank "
                                  f"{group.rank()} of {group.size()}")
        return group

    def _require(self, x, name, length):
        if x.dim() < 2 or tuple(x.shape[:2]) != (self.batch, length):
            raise InvalidArgument(f"{name} is {list(x.shape)}, but must be "
                                  f"[{self.batch},{length},…]")

    def __repr__(self):
        return (f"SequenceShard(batch={self.batch}, length={self.length}, size={self.size}, "
                f"rank={self.rank})")


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, local, shard, group, backward):
        ctx.form = shard, group, backward
        return _gathered(local, shard, group)

    @staticmethod
    @first_order
    def backward(ctx, d_full):
        shard, group, backward = ctx.form
        if backward == "slice":
            return d_full[:, shard.offset:shard.offset + shard.count], None, None, None
        return _sum_of_parts(d_full, shard, group), None, None, None


def _gathered(local, shard, group):
    rest = local.shape[2:]
    padded = local.new_zeros(shard.batch, shard.padded_length, *rest)
    padded[:, :shard.count] = local
    pieces = local.new_empty(shard.size, *padded.shape)
    if pieces.numel() > 0:
        dist.all_gather_into_tensor(pieces.flatten(0, 1), padded, group=group)
    return pieces.transpose(0, 1).flatten(1, 2)[:, :shard.length].contiguous()


def _sum_of_parts(d_full, shard, group):
    """Returns this rank's piece of the sum of all ranks' d_full. Ranks exchange pieces and add them
    locally, because reduce_scatter adds in an unspecified order."""
    ranks = range(shard.size)
    counts = [shard.count_of(rank) for rank in ranks]
    sent = torch.cat([piece.flatten() for piece in d_full.split(counts, 1)])
    shape = (shard.batch, shard.count, *d_full.shape[2:])
    received = sent.new_empty(shard.size, *shape)
    each = received[0].numel()
    per_token = shape[0] * d_full.shape[2:].numel()
    if sent.numel() > 0:
        dist.all_to_all_single(received.view(-1), sent, [each] * shard.size,
                               [count * per_token for count in counts], group=group)
    total = received[0].float() if d_full.dtype in (torch.bfloat16, torch.float16) else received[0]
    for rank in ranks[1:]:
        total = total + received[rank]
    return total.to(d_full.dtype)
