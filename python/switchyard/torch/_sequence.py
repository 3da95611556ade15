"""Sequences cut over ranks into pieces of uneven length, without a padded token ever being made."""
import operator

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from .._library import InvalidArgument
from ._functions import first_order
from ._process_group import group_of

_MOST = 2**63 - 1  # that a size of torch can be
_ADJOINTS = ("slice", "sum")


class SequenceShard:
    """The tokens of rank `rank` of `size`, when `batch` sequences of `length` tokens are each cut
    into pieces of padded_length: the last pieces may be shorter, or empty.

    13 tokens over 4 ranks are pieces of 4, 4, 4 and 1, and 5 tokens of 2, 2, 1 and 0, as torch's
    Shard cuts them, too. Local token (b, i) is token offset + i of sequence b.
    """

    def __init__(self, batch, length, size, rank):
        self.batch, self.length, self.size, self.rank = map(operator.index,
                                                            (batch, length, size, rank))
        if batch < 0 or length < 0:
            raise InvalidArgument(f"batch ({batch}) and length ({length}) must not be negative")
        if size < 1 or not 0 <= rank < size:
            raise InvalidArgument(f"size ({size}) must be positive, and rank ({rank}) one of so "
                                  "many ranks")
        if max(batch, 1) * (length + size - 1) > _MOST:
            raise InvalidArgument(f"batch ({batch}) sequences of length ({length}) over size "
                                  f"({size}) ranks have more tokens than 64 bits can count")

    @classmethod
    def of(cls, x):
        """The shard of a DTensor x [batch, length, …] that one dimension of its mesh shards along
        the sequence. The batch is what this rank has of it."""
        return cls._found(x)[0]

    @classmethod
    def _found(cls, x):
        """The shard, and the dimension of the mesh."""
        found = [d for d, placement in enumerate(x.placements)
                 if type(placement) is Shard and placement.dim % x.dim() == 1]
        if len(found) != 1 or any(placement.is_partial() for placement in x.placements):
            raise InvalidArgument(f"a DTensor {list(x.shape)} is placed {x.placements}, but one "
                                  "dimension of its mesh must be Shard(1), and none partial")
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
        """The first token of the piece, at most length."""
        return self.offset_of(self.rank)

    @property
    def count(self):
        """Tokens of the piece; may be 0."""
        return self.count_of(self.rank)

    @property
    def num_tokens(self):
        """Tokens of this rank: batch · count."""
        return self.batch * self.count

    def offset_of(self, rank):
        return min(rank * self.padded_length, self.length)

    def count_of(self, rank):
        return min(self.padded_length, self.length - self.offset_of(rank))

    def cut(self, x):
        """This rank's piece [batch, count, …] of x [batch, length, …], which every rank has.

        A view. Its gradient is 0 outside of the piece, so that whoever x comes from has a part of
        it on every rank. A DTensor gives its piece, and is told of the whole gradient.
        """
        if isinstance(x, DTensor):
            return self._local(x)
        self._require(x, "x", self.length)
        return x[:, self.offset:self.offset + self.count]

    def cut_tokens(self, x):
        """The same as tokens [batch · count, …], as layers take them."""
        return self.cut(x).flatten(0, 1)

    def gather(self, local, group=None, *, backward):
        """The whole sequence [batch, length, …], from local [batch, count, …] on every rank of
        `group`. Collective; a DTensor brings its group along.

        `backward` says how a gradient comes back, and has no default, since the wrong one scales
        gradients by `size`: "slice" where what follows is replicated, so that every rank has the
        whole gradient and takes its slice of it; "sum" where every rank does something else, so
        that their gradients are parts, which are added in the order of ranks, in f32.
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
        """The same from tokens [batch · count, …], as layers give them."""
        if tokens.dim() < 1 or tokens.shape[0] != self.num_tokens:
            raise InvalidArgument(f"tokens is {list(tokens.shape)}, but the shard has {self.batch} "
                                  f"x {self.count} tokens")
        return self.gather(tokens.unflatten(0, (self.batch, self.count)), group, backward=backward)

    def to_dtensor(self, local, mesh):
        """local [batch, count, …] as a DTensor [batch, length, …], Shard(1) over `mesh`, a
        DeviceMesh of one dimension. Nothing is sent."""
        self._require(local, "local", self.count)
        self._require_ranks(mesh)
        shape = torch.Size((self.batch, self.length, *local.shape[2:]))
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(local.contiguous(), mesh, [Shard(1)], run_check=False,
                                  shape=shape, stride=stride)

    def _local(self, x):
        """This rank's piece of a DTensor that is sharded along the sequence, or replicated."""
        if x.placements == (Replicate(),):
            x = x.redistribute(placements=[Shard(1)])
        found = self.of(x)
        if vars(found) != vars(self):
            raise InvalidArgument(f"the DTensor is {found}, but the shard {self}")
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
    """This rank's piece of the sum of all ranks' d_full. Ranks send each other their pieces, since
    the order in which reduce_scatter adds is anybody's guess."""
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
