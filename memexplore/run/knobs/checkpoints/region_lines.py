"""The text of a region of calls that the backward pass runs again, for the lines of `checkpoints`.

It is a short form of `knobs.checkpoints.regions`; tests compare the tapes of the two row by row.
"""

REGION_IMPORTS = """\
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import get_device_states, set_device_states"""
"""The imports of `REGION`."""
REGION = '''\
class Keep(torch.autograd.Function):
    """A node that saves tensors for backward; hooks on saved tensors apply to it."""

    @staticmethod
    def forward(ctx, nothing, *tensors):
        ctx.save_for_backward(*tensors)
        return nothing.clone()

class Later:
    """Stand-in for a saved tensor that backward recomputes."""

    def __init__(self, region, source=None):
        self.region, self.source, self.value = region, source, None

    def get(self):
        if self.value is None:
            self.region.run_again()
        value, self.value = self.value, None
        return value

class Stop(Exception):
    pass

class Region:
    """Calls that save only tensors from outside; the first backward that needs others runs all calls again."""

    def __init__(self):
        self.calls, self.saved, self.asked, self.made, self.over, self.last = [], [], [], {}, False, -1

    def source(self, tensor):
        """Return the call that made a tensor and the index of the result; None for a tensor from outside."""
        made, version, *source = self.made.get(id(tensor), (lambda: None, 0))
        return source if made() is tensor and version == tensor._version else None

    def goes_on(self, args, kwargs):
        sources = [self.source(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        follows = any(source and source[0] == len(self.calls) - 1 for source in sources)
        return follows and not self.over and self.cast == self.cast_now()

    @staticmethod
    def cast_now():
        dtype, enabled = torch.get_autocast_dtype("cuda"), torch.is_autocast_enabled("cuda")
        return dtype, enabled, torch.is_autocast_cache_enabled()

    def run(self, forward, *args, **kwargs):
        leaves, form = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        outside = [tensor for tensor in tensors if self.source(tensor) is None]
        number = {id(tensor): count for count, tensor in enumerate(outside)}
        inputs = [
            self.source(leaf) or number[id(leaf)] if isinstance(leaf, torch.Tensor) else (leaf,) for leaf in leaves
        ]
        needs = {source[0] for source in inputs if type(source) is list}
        keeper = Keep.apply(torch.empty(0, requires_grad=True), *outside)
        state = torch.get_rng_state(), *get_device_states(*outside)
        self.cast = self.cast_now()
        self.calls.append((forward, inputs, form, needs, keeper, state))
        del leaves, tensors, outside
        with saved_tensors_hooks(self.pack, Later.get):
            result = forward(*args, **kwargs)
        for count, leaf in enumerate(tree_leaves(result)):
            if isinstance(leaf, torch.Tensor):
                self.made[id(leaf)] = weakref.ref(leaf), leaf._version, len(self.calls) - 1, count
        return result

    def pack(self, tensor):
        later = Later(self)
        self.saved.append(weakref.ref(later))
        return later

    def run_again(self):
        self.over, filled = True, []
        asked = [later for ref in self.asked if (later := ref()) is not None and later.value is None]

        def fill(tensor):
            later, tensor = self.saved[len(filled)](), tensor.detach()
            filled.append(later is not None)
            if later is not None:
                later.value = tensor
            if len(filled) == len(self.saved) and not asked:
                raise Stop
            return tensor

        dtype, enabled, cached = self.cast
        cast = torch.autocast("cuda", dtype, enabled, cached)
        try:
            with torch.random.fork_rng(self.calls[0][5][1]), cast, torch.enable_grad():
                with saved_tensors_hooks(fill, lambda tensor: tensor):
                    self.replay(asked)
        except Stop:
            pass
        assert len(filled) == len(self.saved), "the calls saved other tensors in backward than in forward"

    def replay(self, asked):
        results = {}
        for number, (forward, inputs, form, _, keeper, (host, devices, states)) in enumerate(self.calls):
            kept = keeper.grad_fn.saved_tensors
            given = [
                results[source[0]][source[1]]
                if type(source) is list
                else kept[source]
                if type(source) is int
                else source[0]
                for source in inputs
            ]
            args, kwargs = tree_unflatten(given, form)
            for other in set(results).difference(*(call[3] for call in self.calls[number + 1 :])):
                del results[other]
            torch.set_rng_state(host)
            set_device_states(devices, states)
            results[number] = tree_leaves(forward(*args, **kwargs))
            del args, kwargs, given, kept
            for later in asked:
                (call, leaf), size, stride, offset = later.source
                if call == number:
                    value = results[number][leaf].detach()
                    later.value = value.as_strided(size, stride, value.storage_offset() + offset)
'''
"""The class `Region`."""
SEGMENTS = """\
regions = weakref.WeakValueDictionary()

def in_segment(segment, position, forward, *args, **kwargs):
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    region = regions.get(segment)
    if region is None or region.last >= position or not region.goes_on(args, kwargs):
        region = regions[segment] = Region()
    region.last = position
    return region.run(forward, *args, **kwargs)
"""
"""A function for blocks of a segment that the model calls one after another."""
NORMS = '''\
made, last = weakref.WeakValueDictionary(), weakref.WeakValueDictionary()

def memory(tensor):
    return tensor.untyped_storage()._cdata

def recomputed(kind, module, forward, *args, **kwargs):
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    region = None if kind == "norm" else last.get("norm")
    if region is None or not region.goes_on(args, kwargs):
        if kind == "saves its result" or (kind == "activation" and getattr(module, "inplace", False)):
            return forward(*args, **kwargs)  # recomputing would save no memory
        region = Region()
    last.pop("norm", None)
    if kind == "norm":
        last["norm"] = region
    outside = [memory(value) for value in (*args, *kwargs.values()) if region.source(value) is None]
    result = region.run(forward, *args, **kwargs)
    if memory(result) not in outside:
        made[memory(result)], result.region = result, weakref.ref(region)
    return result

def pack(tensor):
    """Save no result that is recomputed, whichever op saves it."""
    result = made.get(memory(tensor))
    region = result.region() if result is not None else None
    source = region.source(result) if region is not None else None
    if source is None or tensor.dtype != result.dtype or tensor._version != result._version:
        return tensor if tensor.is_leaf else tensor.detach(), tensor._version
    offset = tensor.storage_offset() - result.storage_offset()
    later = Later(region, (source, tensor.shape, tensor.stride(), offset))
    region.asked.append(weakref.ref(later))
    return later

def unpack(kept):
    if isinstance(kept, Later):
        return kept.get()
    tensor, version = kept
    assert tensor._version == version, "a tensor that is saved for backward was overwritten"
    return tensor

hooks = saved_tensors_hooks(pack, unpack)
hooks.__enter__()  # until hooks.__exit__()
'''
"""Functions for normalisations and activation functions, and hooks that keep their results from being saved."""
