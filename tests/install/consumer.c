/* SPDX-License-Identifier: Apache-2.0 */
#include <heddle.h>
int main(void) {
    return heddle_version() == HEDDLE_VERSION && heddle_device_available(HEDDLE_CPU, NULL, 0) == HEDDLE_OK ? 0 : 1;
}
