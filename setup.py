"""Build of the native CPU kernels. All other settings of the package are in pyproject.toml."""

from glob import glob

from setuptools import Extension, setup

SOURCES = "paceline/kernels/native/src"

setup(
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
