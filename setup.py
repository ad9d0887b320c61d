"""Build of the native CPU kernels. All other settings of the package are in pyproject.toml."""

import os
from concurrent.futures import ThreadPoolExecutor
from glob import glob

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = "paceline/kernels/native/src"


class BuildInParallel(build_ext):
    """Compiles the source files of an extension side by side, one on each processor that this process may use.

    setuptools compiles the files of one extension one after the other.
    """

    def build_extension(self, ext: Extension) -> None:
        compile_files = self.compiler.compile

        def compile_side_by_side(sources: list[str], **options) -> list[str]:
            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                objects = pool.map(lambda source: compile_files([source], **options), sources)
                return [path for paths in objects for path in paths]

        self.compiler.compile = compile_side_by_side
        try:
            super().build_extension(ext)
        finally:
            self.compiler.compile = compile_files


setup(
    cmdclass={"build_ext": BuildInParallel},
    ext_modules=[
        # A library with a C interface, not a Python module. If it cannot be compiled, the package is installed without
        # it.
        Extension(
            "paceline.kernels.native._library",
            sources=sorted(glob(f"{SOURCES}/*.cpp")),
            depends=sorted(glob(f"{SOURCES}/*.h")),
            language="c++",
            # -ffp-contract=off: a product and a sum are fused only where the source says so, because results must not
            # depend on how the compiler unrolls a loop. No -march: the library chooses its instructions at run time.
            extra_compile_args=[
                "-std=c++17",
                "-O3",
                "-ffp-contract=off",
                "-fvisibility=hidden",
                "-pthread",
                "-Wno-psabi",
            ],
            # Link the C++ runtime statically, without parts that need a newer glibc, so that older systems can run it.
            extra_link_args=["-pthread", "-static-libstdc++", "-Wl,--exclude-libs,ALL", "-Wl,--gc-sections"],
            # The library does not use Python's C API, so one build works with every Python version.
            py_limited_api=True,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
