# SPDX-License-Identifier: Apache-2.0
"""A program of its own that is built with the Conan package and run: conan create . (in the root of the tree)."""

import os

from conan import ConanFile
from conan.tools.build import can_run
from conan.tools.cmake import CMake, cmake_layout


class Consumer(ConanFile):
    settings = "os", "arch", "compiler", "build_type"
    generators = "CMakeDeps", "CMakeToolchain"

    def requirements(self):
        self.requires(self.tested_reference_str)

    def layout(self):
        cmake_layout(self)

    def build(self):
        cmake = CMake(self)
        cmake.configure()
        cmake.build()

    def test(self):
        for library in ("heddle", "heddle_static") if can_run(self) else ():
            self.run(os.path.join(self.cpp.build.bindir, f"with_{library}"), env="conanrun")
