# SPDX-License-Identifier: Apache-2.0
# Of abidiff's report the lines that tell of what breaks programs: to abidiff a field in the middle of a structure is a change like
# one at its end, which heddle's structures may have. A reserved field may become others. Status 1: there are such lines.
{
    match($0, /^ */)
    indent = RLENGTH
}
skips && indent > depth { next }
{ skips = 0 }
/type of '[^']* reserved[0-9]*' changed/ {
    skips = 1
    depth = indent
    next
}
/offset changed|data member deletion|enumerator (deletion|change)|type name changed from/ {
    print
    broken = 1
}
/type size changed from [0-9]+ to [0-9]+/ {
    split(substr($0, index($0, "from ")), word, " ")
    if (word[4] + 0 < word[2] + 0) {
        print
        broken = 1
    }
}
END { exit broken }
