"""Compiles the native CPU kernels. Everything else about the package stands in pyproject.toml."""

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
            # A product and a sum are fused only if the source says so, not as the compiler likes: results must not
            # depend on how a loop was unrolled. There is no -march: the library chooses its instructions when it runs.
            extra_compile_args=[
                "-std=c++17",
                "-O3",
                "-ffp-contract=off",
                "-fvisibility=hidden",
                "-pthread",
                "-Wno-psabi",
            ],
            # The C++ runtime is linked in, without the parts that need a newer glibc, so that older systems can run it.
            extra_link_args=["-pthread", "-static-libstdc++", "-Wl,--exclude-libs,ALL", "-Wl,--gc-sections"],
            # It uses nothing of Python, so one build serves every version.
            py_limited_api=True,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
