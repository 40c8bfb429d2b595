"""Python loads this at its start where this folder is in PYTHONPATH: torch then leaves memory unpinned that is asked for as pinned.

SGLang's LoRA layers ask for pinned memory whatever the device, which a machine without a GPU does not have.
"""

import importlib.abc
import importlib.util
import sys


def unpinned(make):
    return lambda *arguments, pin_memory=False, **options: make(*arguments, **options)


def change(torch):
    for name in ("arange", "empty", "full", "ones", "tensor", "zeros"):
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *arguments: self


class AfterTorch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            change(module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, AfterTorch())
