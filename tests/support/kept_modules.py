"""Code for scripts: modules outlive the exit, so finalizers run when their globals are None.

The exiting interpreter clears every module that something still refers to, and drops the script's
own variables later. Some packages keep modules alive, for example torch.
"""

KEEPS_MODULES = """
import atexit, sys
atexit.register(lambda: setattr(sys, "kept_modules", list(sys.modules.values())))
"""
