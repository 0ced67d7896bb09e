"""Functions of this process for those of a saved graph: out of cubins, or out of modules that launches have loaded."""

from collections.abc import Sequence
from typing import Any

from bench.graph_persistence.images import ImageStore, LoadedImage, load_image
from bench.graph_persistence.rebuild import set_attributes
from bench.graph_persistence.saved import SavedFunction, SavedGraph, match_functions
from bench.graph_persistence.walk import Walker, describe, name_of, siblings
from bullet_graph.errors import CacheError, PartitionError
from bullet_graph.partition.driver import CudaDriver


class ImageFunctions:
    """Loads cubins once and looks functions up in them by name.

    Attributes:
        loaded: by SHA-256.
    """

    def __init__(self, driver: CudaDriver, store: ImageStore) -> None:
        self._driver, self._store = driver, store
        self.loaded: dict[str, LoadedImage] = {}

    def find(self, wanted: SavedFunction) -> Any | None:
        """A CUfunction with the saved attributes set; None if the function has no cubin.

        Raises:
            CacheError: the cubin is damaged, or does not hold the function.
            PartitionError: the driver refused.
        """
        if not wanted.image:
            return None
        image = self.loaded.get(wanted.image)
        if image is None:
            image = self.loaded[wanted.image] = load_image(self._driver, self._store.read(wanted.image))
        kernel = image.kernels.get(wanted.name)
        if kernel is None:
            raise CacheError(f"cubin {wanted.image[:12]} must hold {wanted.name}, but does not: save again")
        function = self._driver.call("cuKernelGetFunction", kernel)
        set_attributes(self._driver, function, wanted)
        return function


class LoadedFunctions:
    """Functions in the modules of graphs that this process captured: a launch of one loads all that lie beside it.

    Attributes:
        modules_refused: functions whose module could not be listed.
        listed: functions that these modules hold.
    """

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._captured: dict[str, dict[int, Any]] = {}
        self._beside: dict[str, dict[int, Any]] = {}
        self._modules: set[int] = set()
        self.modules_refused = 0
        self.listed = 0

    def harvest(self, raw_graph: int) -> None:
        """List the modules behind a captured graph's kernels."""
        for function in Walker(self._driver).read(raw_graph).functions:
            self._captured.setdefault(name_of(self._driver, function), {})[int(function)] = function
            try:
                module = int(self._driver.call("cuFuncGetModule", function))
                found = [] if module in self._modules else siblings(self._driver, function)
            except PartitionError:
                self.modules_refused += 1
                continue
            self._modules.add(module)
            self.listed += len(found)
            for one in found:
                self._beside.setdefault(name_of(self._driver, one), {})[int(one)] = one

    def find(self, wanted: SavedFunction) -> Any | None:
        """A CUfunction with the saved attributes set; None if no module has it, or several do."""
        # A captured one first: beside it stands the same function, by what may be another handle.
        for group in (self._captured, self._beside):
            handles = group.get(wanted.name, {}).values()
            [function] = match_functions([wanted], [(describe(self._driver, one), one) for one in handles])
            if function is not None:
                set_attributes(self._driver, function, wanted)
                return function
        return None


def require_all(graph: SavedGraph, functions: Sequence[Any | None]) -> list[Any]:
    """The functions, all of them there.

    Raises:
        CacheError: some are missing; the message names them.
    """
    missing = [one.name[:80] for one, found in zip(graph.functions, functions, strict=True) if found is None]
    if missing:
        raise CacheError(
            f"{len(missing)} of {len(functions)} functions are not to be had in this process: {', '.join(missing)}"
        )
    return list(functions)
