"""Records a forward pass as a tape: the model runs as it is, under a `CallObserver`.

No graph outlives an event and no activation outlives the model's own use of it. Whether a value
needs a gradient is overestimated where it cannot be seen, which costs a few sent zeros and is
never wrong. What cannot be recorded raises `CannotRecord` with the module to close.
"""

import inspect
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.overrides import _get_current_function_mode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.hooks import RemovableHandle

from shoal.numerics.buffers import PieceBuffers
from shoal.numerics.compiled import is_transformed
from shoal.numerics.randomness import PieceSeeds, generator_of
from shoal.numerics.storage_address import storage_address
from shoal.parallel.pipeline.calls import (
    HOOKS,
    TAG,
    CallInterceptor,
    CallObserver,
    ValueTag,
    leaves,
)
from shoal.parallel.pipeline.tape import (
    ArgumentLeaf,
    Event,
    Leaf,
    OpaqueLeaf,
    Path,
    PlainLeaf,
    Tape,
    TapeValue,
    ValueLeaf,
    find_tensors,
    is_plain,
    is_trained,
    names_of_buffers,
    objects_in,
    signature,
    units_of,
)
from shoal.parallel.pipeline.trackers import (
    MemoryTracker,
    UnitTensor,
    UnitTensors,
    UnitTracker,
    versions,
)

FLOPS_PER_BYTE = 4  # an operation that only moves memory is not free
_CHECKPOINT = inspect.unwrap(checkpoint).__code__
_FUNCTION = inspect.unwrap(Function.apply).__code__


class CannotRecord(BaseException):
    """The forward cannot be recorded with this module open."""

    def __init__(self, where: str, reason: str):
        self.where, self.reason = where, reason


class MustBeEvent(BaseException):
    """Something has raw inputs alone and has to be an event: it draws random numbers, or reaches
    a parameter or a computed tensor that it was not given."""

    def __init__(self, name: str):
        self.name = name


def record_forward(
    interceptor: CallInterceptor,
    forward: Callable[[], Any],
    *,
    open_modules: frozenset[str],
    drawing: frozenset[str],
    seeds: PieceSeeds | None,
    counts: bool,
) -> Tape:
    """Run one forward and record it. `counts` says whether costs are needed."""
    model = interceptor.model
    seen: list[Any] = []

    def see(_: nn.Module, args: Any, kwargs: Any) -> None:
        seen.append(signature(model, args, kwargs))

    trained = {name: is_trained(p) for name, p in model.named_parameters()}
    tape = Tape(type(model).__name__, None, open_modules, drawing, trained, seeds)
    recorder = _Recorder(interceptor, tape, counts)
    interceptor.close()  # what an earlier attempt stood before may be neither a unit nor open now
    interceptor.cover(units_of(model, open_modules) | open_modules)
    buffers = PieceBuffers(model)
    handle = model.register_forward_pre_hook(see, with_kwargs=True)
    try:
        if seeds is not None:
            seeds.enter(0, 0)
        with recorder.rnn_counted(), recorder.touching(), recorder:
            output = forward()
        if not seen:
            raise CannotRecord("", "it is called past nn.Module.__call__, which its class replaces")
        tape.signature = seen[0]
        if recorder.unseen is not None:
            raise recorder.unseen
        recorder.refuse_unreturned(output)
        recorder.refuse_changes(buffers)
        tape.final = frozenset(recorder.numbers_in(output))
        tape.partial = recorder.filled_in(output)
        return tape
    finally:
        handle.remove()


class _Recorder(CallObserver):
    def __init__(self, interceptor: CallInterceptor, tape: Tape, counts: bool):
        super().__init__(interceptor, tape.drawing)
        self.tape, self.counts, self.seeds = tape, counts, tape.seeds
        self.names = {id(p): name for name, p in interceptor.model.named_parameters()}
        self.buffer_names = names_of_buffers(interceptor.model)
        device = next((str(p.device) for p in interceptor.model.parameters()), "cpu")
        self.generator = generator_of(device)
        self.open_now = [""]
        self.region: FrameType | None = None
        self.known: list[tuple[int, weakref.ref[Tensor]]] = []
        # Raw tensors that became values; kept, so that no address recurs.
        self.written: list[Tensor] = []
        self.unit_tensors = UnitTensors()
        self.unseen: CannotRecord | None = None
        self.parameters_at = _by_address(interceptor.model.named_parameters())
        self.buffers_at = _by_address(interceptor.model.named_buffers())
        self.read_raw: dict[str, str] = {}  # buffer -> the open module whose code read it
        self.read_by: list[tuple[int, set[str]]] = []  # events with the buffers that they read
        self.rnn_flops = 0
        self.num_sets = 0 if self.seeds is None else self.seeds.num_sets
        self.event_drew = False

    def called(
        self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if name in self.tape.open:
            self.open_now.append(name)
            try:
                return call(*args, **kwargs)
            finally:
                self.open_now.pop()
        module = self.interceptor.model.get_submodule(name)
        owns = any(True for _ in module.parameters())  # asked so by a stage too
        if owns:
            _refuse_transform(self.open_now[-1], name)

        def note(*args: Any, **kwargs: Any) -> Any:
            if name in self.drawing or owns or self.numbers_in((args, kwargs)):
                own = self._of_model([*module.parameters(), *find_tensors((args, kwargs))])
                return self._note(name, module, own, call, args, kwargs)
            return self.raw(name, call, args, kwargs)

        return self.interceptor.unwatched(note, args, kwargs)

    def event(
        self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if name == "__set__ data":
            raise CannotRecord(self.open_now[-1], "it assigns to .data of a computed tensor")
        _refuse_transform(self.open_now[-1], name)
        if call is torch.autograd.grad or call is Tensor.backward:  # a gradient penalty, say
            raise CannotRecord(self.open_now[-1], f"it takes a gradient of its own ({name})")
        parameters = self._of_model(leaves((args, kwargs), []))
        return self._note(name, None, parameters, call, args, kwargs)

    def raw(
        self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self.refuse_unreturned((args, kwargs))
        state, before = self.generator.get_state(), versions((args, kwargs))
        with self.touched.noted() as touched:
            result = call(*args, **kwargs)
        if self._reaches_computed(touched, (args, kwargs)):
            raise MustBeEvent(name)
        read = self._named(self.buffers_at, touched)
        self.read_raw.update(dict.fromkeys(read, self.open_now[-1]))
        changed = self._names((), [x for x, version in before if x._version != version])
        if changed and self.tape.events:  # stages that have ended by then would not see it
            raise CannotRecord(self.open_now[-1], f"it changes the buffer {changed[0]} on the way")
        if not torch.equal(state, self.generator.get_state()):
            if not self._can_repeat():
                raise MustBeEvent(name)
            self.tape.draws_again.add(name)
        return result

    def form(self, name: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tag = self.tag(args[0]) if args and isinstance(args[0], Tensor) else None
        if tag is not None and name == "requires_grad":
            return tag.number in self.tape.need_gradient
        if tag is not None and name in HOOKS:  # values carry no graph while they are recorded
            return RemovableHandle(OrderedDict())
        return function(*args, **kwargs)

    def numbers_in(self, tree: Any) -> set[int]:
        """The values in a tree of any objects."""
        return {tag.number for x in find_tensors(tree) if (tag := self.tag(x)) is not None}

    def filled_in(self, output: Any) -> dict[Path, int]:
        """The objects in an output that hold what units made, such as a cache of keys and values;
        the first event that did. No stage has all of it."""
        found: dict[Path, int] = {}
        for path, item in objects_in(output):
            tensors = list(find_tensors(item))
            makers = [
                unit_tensor.event
                for x in tensors
                if (unit_tensor := self.unit_tensors.of_object(x))
            ]
            if makers and not any(self.tag(x) for x in tensors):
                found[path] = min(makers)
        return found

    def _of_model(self, items: Iterable[Any]) -> list[nn.Parameter]:
        """The model's parameters among these, each once."""
        return list(dict.fromkeys(x for x in items if id(x) in self.names))

    @contextmanager
    def touching(self) -> Iterator[None]:
        """Nothing of it stays: a cycle would keep what units made."""
        try:
            with MemoryTracker(self._refuse_out_of_sight) as self.touched:
                yield
        finally:
            del self.touched

    @contextmanager
    def rnn_counted(self) -> Iterator[None]:
        """torch's counter does not see the flops of recurrent layers."""

        def count(module: Any, args: Any) -> None:
            data = args[0].data if hasattr(args[0], "batch_sizes") else args[0]
            matrices = sum(p.numel() for p in module.parameters() if p.dim() > 1)
            self.rnn_flops += 2 * matrices * (data.numel() // max(1, module.input_size))

        recurrent = [m for m in self.interceptor.model.modules() if isinstance(m, nn.RNNBase)]
        handles = [m.register_forward_pre_hook(count) for m in recurrent]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _note(
        self,
        name: str,
        module: nn.Module | None,
        parameters: list[nn.Parameter],
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run an event and record it."""
        self.refuse_unreturned((args, kwargs))
        uses, items = self.numbers_in((args, kwargs)), leaves((args, kwargs), [])
        tensors = [x for x in items if isinstance(x, Tensor)]
        before = versions(items)
        is_inside = self._enter_region()
        block = 0 if self.seeds is None else self.seeds.block
        is_fresh = self.seeds is None or self._can_repeat()
        num_sets = 0 if self.seeds is None else self.seeds.num_sets
        buffers = PieceBuffers(nn.Module() if module is None else module)
        inside = (
            None if module is None else UnitTracker(self.unit_tensors, len(self.tape.events), name)
        )
        with self.touched.noted() as touched, inside or nullcontext():
            result, flops = self._drawn(call, args, kwargs)
        if inside is not None:
            parameters = self._of_model([*parameters, *inside.used.values()])
            uses |= self._values_not_passed(inside, touched, (args, kwargs))
        self.read_by.append((len(self.tape.events), self._read_in(touched, (args, kwargs))))
        names = [self.names[id(p)] for p in parameters]
        names += sorted(self._named(self.parameters_at, touched) - set(names))
        sets = self.seeds is not None and self.seeds.num_sets != num_sets
        changed = [x for x, version in before if x._version != version]
        grows = torch.is_grad_enabled() or self.region is not None
        needs = grows and name != "detach" and self._needs(uses, names, tensors)
        adopts = self._adopt(changed, items, needs)
        made, result, spec = self._take(name, result, items, needs, module is not None)
        self._mutated(changed, needs)
        moved = sum(self.tape.values[m.number].num_bytes for m in made if isinstance(m, ValueLeaf))
        event = Event(
            name=name,
            is_unit=module is not None,
            where=self.open_now[-1],
            parameters=tuple(names),
            buffers=self._names(buffers.places, changed),
            changes=self._names(buffers.changed(), changed),
            uses=frozenset(uses),
            result=made,
            spec=spec,
            only=made[0].number if spec.is_leaf() and isinstance(made[0], ValueLeaf) else None,
            passes=any(isinstance(leaf, ArgumentLeaf) for leaf in made),
            adopts=adopts,
            mutates=bool(changed),
            cost=flops + FLOPS_PER_BYTE * moved,
            block=block,
            block_after=self.seeds.block if self.seeds is not None and sets else None,
            is_fresh=is_fresh,
            is_inside=is_inside,
        )
        self.tape.events.append(event)
        return result

    def _can_repeat(self) -> bool:
        """Whether a stage that skipped all events so far would still draw the same."""
        if self.seeds is None:
            return False
        if self.seeds.num_sets != self.num_sets:  # set by the hooks of an open module
            self.num_sets, self.event_drew = self.seeds.num_sets, False
        return not self.event_drew

    def _drawn(self, call: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, int]:
        """Run an event and see whether it leaves the generator in a state of its own."""
        state = self.generator.get_state()
        result = self._run(call, args, kwargs)
        if self.seeds is not None:
            if self.seeds.num_sets != self.num_sets:
                self.num_sets, self.event_drew = self.seeds.num_sets, not self.seeds.is_unused
            elif not torch.equal(state, self.generator.get_state()):
                self.event_drew = True
        return result

    def _run(self, call: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, int]:
        if not self.counts:
            return call(*args, **kwargs), 0
        before = self.rnn_flops
        with FlopCounterMode(display=False) as counter:
            result = call(*args, **kwargs)
        return result, max(counter.get_total_flops(), self.rnn_flops - before)

    def _needs(self, uses: set[int], parameters: list[str], tensors: list[Tensor]) -> bool:
        return (
            not uses.isdisjoint(self.tape.need_gradient)
            or any(self.tape.parameters[name] for name in parameters)
            or any(x.requires_grad and not isinstance(x, nn.Parameter) for x in tensors)
        )

    def _take(
        self, name: str, result: Any, items: list[Any], needs: bool, is_unit: bool
    ) -> tuple[tuple[Leaf, ...], Any, TreeSpec]:
        """Number the tensors of a result and cut them off from the graph."""
        flat, spec = tree_flatten(result)
        made: list[Leaf] = []
        handed: dict[int, Tensor] = {}
        for i, item in enumerate(flat):
            place = next((j for j, x in enumerate(items) if x is item), None)
            if isinstance(item, Tensor) and (tag := self.tag(item)) is not None:
                made.append(ValueLeaf(tag.number))
            elif place is not None and not is_plain(item):
                made.append(ArgumentLeaf(place))
            elif id(item) in handed:
                flat[i] = handed[id(item)]
                made.append(ValueLeaf(getattr(flat[i], TAG).number))
            elif isinstance(item, Tensor):
                # A unit's is handed on as another object: it may have kept the one that it made.
                flat[i] = item.detach() if is_unit or item.requires_grad else item
                made.append(ValueLeaf(self._number(flat[i], needs)))
                handed[id(item)] = flat[i]
            elif is_plain(item):
                made.append(PlainLeaf(item))
            elif is_unit:  # what it holds is known as made in there, and followed
                made.append(OpaqueLeaf(type(item)))
            else:
                reason = f"{name} returns a {type(item).__name__}, which may hide tensors"
                raise CannotRecord(self.open_now[-1], reason)
        if not is_unit and any(isinstance(m, PlainLeaf) and m.value is not None for m in made):
            reason = f"{name} turns a computed tensor into a Python value"
            raise CannotRecord(self.open_now[-1], reason)
        return tuple(made), tree_unflatten(flat, spec), spec

    def _number(self, tensor: Tensor, needs: bool) -> int:
        number = len(self.tape.values)
        form = TapeValue(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        self.tape.values[number] = form
        self.tape.made_at[number] = len(self.tape.events)
        if needs and (tensor.is_floating_point() or tensor.is_complex()):
            self.tape.need_gradient.add(number)
        setattr(tensor, TAG, ValueTag(self.forward, number))
        self.known.append((number, weakref.ref(tensor)))
        return number

    def _adopt(
        self, changed: list[Tensor], items: list[Any], needs: bool
    ) -> tuple[tuple[int, int], ...]:
        """Raw tensors that were written into hold computed numbers now."""
        adopts = []
        for tensor in changed:
            whole = tensor if tensor._base is None else tensor._base
            if self.tag(whole) is None and not isinstance(whole, nn.Parameter):
                place = next(j for j, x in enumerate(items) if x is tensor)
                adopts.append((place, self._number(whole, needs)))
                self.written.append(whole)
                if whole is not tensor:
                    setattr(tensor, TAG, getattr(whole, TAG))
        return tuple(adopts)

    def _mutated(self, changed: list[Tensor], needs: bool) -> None:
        for tensor in changed:
            if (tag := self.tag(tensor)) is None:
                continue
            if needs:
                self.tape.need_gradient.add(tag.number)
            if tensor.requires_grad and not tensor._is_view():
                tensor.detach_()
            storage = storage_address(tensor)
            alive = [(n, t) for n, ref in self.known if (t := ref()) is not None]
            alike = sorted(
                {self.tape.made_at[n] for n, t in alive if storage_address(t) == storage}
            )
            if len(alike) > 1:  # two views of one memory: sent apart, they would not stay so
                self.tape.uncut.update(range(alike[1] + 1, len(self.tape.events) + 1))

    def _names(self, places: Iterable[Any], written: list[Tensor]) -> tuple[str, ...]:
        """Of a unit's buffers, and of those that an operation wrote into."""
        ids = {id(tensor) for tensor in written}
        named = self.interceptor.model.named_buffers()
        own = tuple(self.buffer_names[id(module), name] for module, name in places)
        return own + tuple(n for n, b in named if id(b) in ids and n not in own) if ids else own

    def refuse_unreturned(self, tree: Any) -> None:
        """What is computed and carries no number would not be carried to later stages."""
        written = {storage_address(t) for t in self.written}
        for x in leaves(tree, []):
            if not isinstance(x, Tensor) or isinstance(x, nn.Parameter) or self.is_computed(x):
                continue
            where = storage_address(x)
            if where in written:
                reason = "it reads a view of a tensor that computed numbers were written into"
                raise CannotRecord(self.open_now[-1], reason)
            if unit_tensor := self.unit_tensors.of_object(x) or self.unit_tensors.at(where):
                reason = (
                    f"it uses {self._described(x)}, which its submodule {unit_tensor.unit} made "
                    "and did not return (let it return what others use)"
                )
                raise CannotRecord(self.open_now[-1], reason)

    def _described(self, tensor: Tensor) -> str:
        """A tensor by the attribute that holds it, if one does, and by its form."""
        form = f"a tensor of shape {tuple(tensor.shape)} and {str(tensor.dtype)[6:]}"
        for path, module in self.interceptor.model.named_modules():
            for key, value in vars(module).items():
                if any(x is tensor for x in find_tensors(value, 3)):
                    return f"{path}.{key}, {form}".lstrip(".")
        return form

    def _values_not_passed(self, inside: UnitTracker, touched: set[int], given: Any) -> set[int]:
        """The values that a unit reached without being given them.

        What another unit stored is not sent: no cut may fall between the two.
        """
        event, found = len(self.tape.events), set()
        makers: list[UnitTensor | None] = []
        known = {storage_address(x) for x in find_tensors(given)}
        for x in inside.used.values():
            tag, unit_tensor = self.tag(x), self.unit_tensors.of_object(x)
            if tag is not None:
                found.add(tag.number)
            elif unit_tensor is not None and unit_tensor.event < event:
                makers.append(unit_tensor)
            else:
                continue
            known.add(storage_address(x))
        for where in touched - known:  # as compiled code reaches them
            found |= self._values_at(where)
            makers.append(self.unit_tensors.at(where))
        for maker in makers:
            if maker is not None:
                self.tape.uncut.update(range(maker.event + 1, event + 1))
        return found

    def _values_at(self, where: int) -> set[int]:
        alive = ((number, tensor) for number, ref in self.known if (tensor := ref()) is not None)
        return {number for number, tensor in alive if storage_address(tensor) == where}

    def _reaches_computed(self, touched: set[int], given: Any) -> bool:
        """Whether memory that holds parameters or computed numbers was touched out of `given`."""
        known = {storage_address(x) for x in find_tensors(given)}
        return any(
            where in self.parameters_at or self.unit_tensors.at(where) or self._values_at(where)
            for where in touched
            if where in self.parameters_at or where not in known
        )

    def _refuse_out_of_sight(self, operation: str, touched: set[int]) -> None:
        """An operation of an open module that no observer sees would run on every stage."""
        if _get_current_function_mode() is self and self._reaches_computed(touched, ()):
            reason = f"compiled code, such as torch.jit.script's, calls {operation} unseen"
            # Raised at the end: compiled code would turn it into an error of its own.
            self.unseen = self.unseen or CannotRecord(self.open_now[-1], reason)

    def _read_in(self, touched: set[int], given: Any) -> set[str]:
        """The buffers among these; one that was written into is a value, which stages are sent."""
        values = {storage_address(x) for x in find_tensors(given) if self.tag(x) is not None}
        return self._named(self.buffers_at, touched - values)

    def _named(self, at: dict[int, list[str]], touched: set[int]) -> set[str]:
        return {name for where in touched for name in at.get(where, ())}

    def refuse_changes(self, buffers: PieceBuffers) -> None:
        """Buffers are followed where a submodule changes them, and nowhere else."""
        seen = {name for event in self.tape.events for name in event.changes}
        for name in seen & self.read_raw.keys():  # on every stage, also on those that are behind
            reason = f"it reads the buffer {name}, which its submodule changes"
            raise CannotRecord(self.read_raw[name], reason)
        for index, names in self.read_by:
            event = self.tape.events[index]
            if others := sorted(names & seen - set(event.buffers)):
                self.tape.events[index] = replace(event, buffers=(*event.buffers, *others))
        for module, name in buffers.changed():
            path, now = self.buffer_names[id(module), name], leaves(module._buffers[name], [])
            computed = [t for t in now if self.is_computed(t) or any(t is w for w in self.written)]
            if path not in seen and computed:
                inside = [m for m in self.tape.open if not m or path.startswith(f"{m}.")]
                reason = f"it changes the buffer {path} outside of a submodule"
                raise CannotRecord(max(inside, key=len, default=""), reason)

    def _enter_region(self) -> bool:
        """Whether this event and the last are of one checkpointed call, which cannot be cut."""
        found, frame = None, sys._getframe()
        while frame is not None:
            if frame.f_code is _FUNCTION:
                kind = getattr(frame.f_locals.get("cls"), "__name__", "a Function")
                reason = f"it calls {kind}.apply, whose backward is its own"
                raise CannotRecord(self.open_now[-1], reason)
            if frame.f_code is _CHECKPOINT:
                found = frame
            frame = frame.f_back  # type: ignore[assignment]
        is_inside = found is not None and found is self.region
        self.region = found
        return is_inside


def _refuse_transform(where: str, name: str) -> None:
    if is_transformed():  # what stands for a value there cannot be sent
        raise CannotRecord(where, f"it runs {name} inside of torch.func")


def _by_address(named: Iterable[tuple[str, Tensor]]) -> dict[int, list[str]]:
    """Names by where the memory of their tensors is; several may share one."""
    found: dict[int, list[str]] = {}
    for name, tensor in named:
        if where := storage_address(tensor):
            found.setdefault(where, []).append(name)
    return found
