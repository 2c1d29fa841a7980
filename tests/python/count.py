# SPDX-License-Identifier: Apache-2.0
"""count.py <junit.xml>: prints how many tests passed and failed; one failed if pytest could not tell."""

import sys
import xml.etree.ElementTree as xml

try:
    suites = list(xml.parse(sys.argv[1]).iter("testsuite"))
    total, failed, skipped = (
        sum(int(suite.get(name, 0)) for suite in suites for name in names)
        for names in (("tests",), ("failures", "errors"), ("skipped",))
    )
except (OSError, xml.ParseError):
    total, failed, skipped = 1, 1, 0
print(total - failed - skipped, failed if total else 1)
