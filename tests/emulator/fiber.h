/* SPDX-License-Identifier: Apache-2.0
 * Fibers: stacks of their own, and the change from one to another. On x86-64 that is ten instructions; elsewhere it is the C library's, which
 * asks the system for the mask of signals each time. */
#ifndef HEDDLE_TESTS_FIBER_H
#define HEDDLE_TESTS_FIBER_H

#include <stddef.h>

#if defined(__x86_64__) && !defined(EMULATOR_UCONTEXT)

struct fiber_context {
    void *stack; /* its top, where the registers lie that a function has to keep */
};

extern "C" void emulator_switch(void **from, void *to);
__asm__(".text\n"
        ".p2align 4\n"
        ".hidden emulator_switch\n"
        ".type emulator_switch, @function\n"
        "emulator_switch:\n"
        "    push %rbp\n    push %rbx\n    push %r12\n    push %r13\n    push %r14\n    push %r15\n"
        "    mov %rsp, (%rdi)\n"
        "    mov %rsi, %rsp\n"
        "    pop %r15\n    pop %r14\n    pop %r13\n    pop %r12\n    pop %rbx\n    pop %rbp\n"
        "    ret\n"
        ".size emulator_switch, . - emulator_switch\n");

static inline void fiber_switch(fiber_context *from, fiber_context *to) {
    emulator_switch(&from->stack, to->stack);
}

/* The first change to it calls `begin`, which never returns. */
static inline void fiber_begin(fiber_context *f, char *stack, size_t bytes, void (*begin)(void)) {
    void **top = (void **)(stack + bytes);
    *--top = NULL; /* where a function's caller would go on: there is none */
    *--top = (void *)begin;
    for (int x = 0; x < 6; x++)
        *--top = NULL;
    f->stack = top;
}

#else

#include <ucontext.h>

struct fiber_context {
    ucontext_t context;
};

static inline void fiber_switch(fiber_context *from, fiber_context *to) {
    swapcontext(&from->context, &to->context);
}

static inline void fiber_begin(fiber_context *f, char *stack, size_t bytes, void (*begin)(void)) {
    getcontext(&f->context);
    f->context.uc_stack.ss_sp = stack;
    f->context.uc_stack.ss_size = bytes;
    f->context.uc_link = NULL;
    makecontext(&f->context, begin, 0);
}

#endif
#endif
