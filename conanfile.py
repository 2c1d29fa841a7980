# SPDX-License-Identifier: Apache-2.0
"""The recipe for Conan 2. `conan create .` builds the package and a program with it; so does `./dev package conan`."""

import os
import re
from typing import ClassVar

from conan import ConanFile
from conan.tools.cmake import CMake, CMakeDeps, CMakeToolchain, cmake_layout
from conan.tools.files import load


class Heddle(ConanFile):
    name = "heddle"
    description = "Exact attention and fused LayerNorm+Linear, forward and backward, on the CPU and on NVIDIA GPUs"
    license = "Apache-2.0"
    topics = ("attention", "flash-attention", "layernorm", "transformer", "cuda")
    # The static library is in the package, too: heddle::heddle_static in CMake.
    package_type = "shared-library"
    languages = "C"
    settings = "os", "arch", "compiler", "build_type"
    options: ClassVar = {"openmp": [True, False], "cuda": [True, False], "tools": [True, False]}
    default_options: ClassVar = {"openmp": True, "cuda": False, "tools": False}
    exports_sources = "CMakeLists.txt", "LICENSE", "README.md", "cmake/*", "include/*", "src/*", "tools/*", "examples/*"
    test_package_folder = "tests/conan"

    def set_version(self):
        header = load(self, os.path.join(self.recipe_folder, "include", "heddle.h"))
        parts = re.findall(r"^#define HEDDLE_VERSION_(?:MAJOR|MINOR|PATCH) +(\d+)", header, re.M)
        self.version = ".".join(parts)

    def layout(self):
        cmake_layout(self)

    def generate(self):
        toolchain = CMakeToolchain(self)
        variables = {"OPENMP": self.options.openmp, "BUILD_CUDA": self.options.cuda, "BUILD_TOOLS": self.options.tools}
        for name, value in variables.items():
            toolchain.cache_variables[f"HEDDLE_{name}"] = "ON" if value else "OFF"
        for name in ("BUILD_EXAMPLES", "BUILD_TESTS"):
            toolchain.cache_variables[f"HEDDLE_{name}"] = "OFF"
        toolchain.generate()
        CMakeDeps(self).generate()

    def build(self):
        cmake = CMake(self)
        cmake.configure()
        cmake.build()

    def package(self):
        CMake(self).install()

    def package_info(self):
        # CMake finds what the library installs for it, and so the same targets as without Conan.
        self.cpp_info.set_property("cmake_find_mode", "none")
        self.cpp_info.builddirs.append(os.path.join("lib", "cmake", "heddle"))
        self.cpp_info.libs = ["heddle"]
        if self.settings.os == "Linux":
            self.cpp_info.system_libs = ["m"]
