# SPDX-License-Identifier: Apache-2.0
"""What ``heddle.parallel`` is made of. docs/parallel.md tells how it works."""
