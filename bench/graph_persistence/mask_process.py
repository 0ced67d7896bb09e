"""Which SMs rebuilt graphs run on: what of a partition is in the node, and what must be given anew (step E)."""

from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

from bench.graph_persistence.costs import exec_update
from bench.graph_persistence.job import Job
from bench.graph_persistence.rebuild import USE_NODE_PRIORITY, add_kernel, kernel_parameters
from bench.graph_persistence.saved import SavedKernel
from bench.graph_persistence.step_log import StepLog
from bench.graph_persistence.walk import Walk, Walker
from bullet_graph.partition.backend import open_smctrl
from bullet_graph.partition.driver import CudaDriver
from bullet_graph.partition.green import GreenBackend
from bullet_graph.partition.probe import SmidProbe
from bullet_graph.partition.protocol import PartitionBackend
from bullet_graph.partition.spec import WHOLE_GPU, partition_of

DECODE_SMS = 16
Build = Callable[[], Any]


class MaskExperiment:
    """One back end: a probe's kernel captured in a partition, and graphs made of that one in several ways."""

    def __init__(self, backend: PartitionBackend, probe: SmidProbe) -> None:
        self.driver, self.probe, self.backend = probe.driver, probe, backend
        self.partition = partition_of(DECODE_SMS, num_sms=probe.num_sms)
        self.plain = backend.stream("prefill", WHOLE_GPU)
        self.kernel = self.driver.api.CUkernel(int(probe._function))

    def capture(self) -> Any:
        """The probe's launch on the partition's stream."""
        stream = self.backend.stream("decode", self.partition)
        mode = self.driver.api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        self.driver.call("cuStreamBeginCapture", stream, mode)
        try:
            self.probe._launch(stream, 0, 1)
        finally:
            graph = self.driver.call("cuStreamEndCapture", stream)
        self.backend.stream("decode", WHOLE_GPU)
        return graph

    def sms(self, executable: Any) -> int:
        """SMs that a launch on the unmasked stream uses."""
        self.probe._erase(self.plain)
        self.driver.call("cuGraphLaunch", executable, self.plain)
        return len(self.probe._read(self.plain, 0, 1))

    def instantiate(self, graph: Any) -> Any:
        return self.driver.call("cuGraphInstantiate", graph, USE_NODE_PRIORITY)

    def instantiated(self, build: Build) -> Any:
        return self.instantiate(build())

    def node(self, graph: Any) -> Any:
        nodes, _ = self.driver.call("cuGraphGetNodes", graph, 1)
        return nodes[0]

    def made(self, walk: Walk, **handles: Any) -> Any:
        """A new graph of the walked kernel."""
        [kernel] = walk.graph.kernels()
        graph = self.driver.call("cuGraphCreate", 0)
        layout = walk.graph.functions[kernel.function].layout
        parameters = kernel_parameters(self.driver, kernel, layout, **handles)
        add_kernel(self.driver, graph, parameters, kernel.attributes)
        return graph

    def made_in(self, context: Any, walk: Walk, of_context: bool) -> Any:
        """As :meth:`made` while a context is current; with its own CUfunction, or a CUkernel and no context."""
        self.driver.call("cuCtxPushCurrent", context)
        try:
            if of_context:
                return self.made(walk, function=self.driver.call("cuKernelGetFunction", self.kernel))
            return self.made(walk, kernel=self.kernel)
        finally:
            self.driver.call("cuCtxPopCurrent")

    def with_attributes_of(self, captured: Any, walk: Walk) -> Any:
        """A new graph whose node was given the captured node's attributes by the driver itself."""
        graph = self.made(walk, kernel=self.kernel)
        self.driver.call("cuGraphKernelNodeCopyAttributes", self.node(graph), self.node(captured))
        return graph

    def with_parameters_set(self, captured: Any, walk: Walk, **handles: Any) -> Any:
        """A clone of the captured graph whose node was given parameters anew: a template of a partition."""
        clone = self.driver.call("cuGraphClone", captured)
        [kernel] = walk.graph.kernels()
        layout = walk.graph.functions[kernel.function].layout
        parameters = kernel_parameters(self.driver, kernel, layout, **handles)
        self.driver.call("cuGraphKernelNodeSetParams", self.node(clone), parameters.value)
        return clone

    def updated(self, first: Any, second: Any) -> Any:
        """The executable of one graph after an update from another."""
        executable = self.instantiate(first)
        verdict = exec_update(self.driver, executable, second)
        if not verdict["works"]:
            raise RuntimeError(f"cuGraphExecUpdate: {verdict['status']}, {verdict['result']}")
        return executable

    def run(self, log: StepLog) -> None:
        """Log every way: the SMs seen, and whether they are the partition's number."""
        name = self.backend.name
        captured = self.capture()
        walk = Walker(self.driver).read(int(captured))
        raw = self.driver.call("cuGraphKernelNodeGetParams", self.node(captured))
        log.run(
            f"E: {name}: the captured node",
            lambda: {
                "func": hex(int(raw.func)),
                "kern": hex(int(raw.kern)),
                "ctx": hex(int(raw.ctx)),
                "current_ctx": hex(int(self.driver.call("cuCtxGetCurrent"))),
                "kernel_handle": hex(int(self.kernel)),
                "attributes_beyond_a_fresh_node": [key for key, _ in _only(walk).attributes],
            },
        )
        graphs: dict[str, Build] = {
            "as captured": lambda: captured,
            "cuGraphClone": lambda: self.driver.call("cuGraphClone", captured),
            "new node, CUfunction as captured": lambda: self.made(walk, function=walk.functions[0]),
            "new node, CUkernel": lambda: self.made(walk, kernel=self.kernel),
            "new node, attributes copied": lambda: self.with_attributes_of(captured, walk),
            "captured node, parameters set, CUfunction as captured": lambda: self.with_parameters_set(
                captured, walk, function=walk.functions[0]
            ),
            "captured node, parameters set, CUkernel": lambda: self.with_parameters_set(
                captured, walk, kernel=self.kernel
            ),
        }
        if name == "green":
            stream = self.backend.stream("decode", self.partition)
            green = self.driver.call("cuStreamGetGreenCtx", stream)
            context = self.driver.call("cuCtxFromGreenCtx", green)
            graphs |= {
                "new node, CUkernel and ctx of the partition": lambda: self.made(
                    walk, kernel=self.kernel, context=context
                ),
                "new node, CUkernel, made in the partition's context": lambda: self.made_in(
                    context, walk, False
                ),
                "new node, CUfunction of the partition's context": lambda: self.made_in(context, walk, True),
            }
        bare = graphs["new node, CUkernel"]
        ways: dict[str, Build] = {way: partial(self.instantiated, build) for way, build in graphs.items()} | {
            "executable of the capture, updated from a new node": lambda: self.updated(captured, bare()),
            "executable of a new node, updated from the capture": lambda: self.updated(bare(), captured),
        }
        for way, build in ways.items():
            log.run(f"E: {name}: {way}", partial(self.seen, build))

    def seen(self, build: Build) -> dict[str, Any]:
        """What a step of the log keeps of an executable's launch."""
        sms = self.sms(build())
        return {"works": sms == DECODE_SMS, "sms": sms, "of": self.probe.num_sms}


def _only(walk: Walk) -> SavedKernel:
    [kernel] = walk.graph.kernels()
    return kernel


def run(job: Job, log: StepLog) -> None:  # noqa: ARG001 - every role's signature
    """Both back ends; the unmasked one tells that the probe reaches all SMs."""
    driver = CudaDriver()
    for name, opener in (("green", GreenBackend), ("smctrl", open_smctrl)):
        with ExitStack() as undo:
            probe = undo.enter_context(closing(SmidProbe(0, driver=driver)))
            backend: Any = log.run(f"E: open {name}", lambda: opener(SmidProbe(0, driver=driver)))  # noqa: B023
            if backend is None:
                continue
            undo.callback(backend.close)
            log.run(f"E: {name}: experiment", lambda: MaskExperiment(backend, probe).run(log))  # noqa: B023
