/* SPDX-License-Identifier: Apache-2.0
 * What the parts of derivation.c share: how a line is printed, and what counts as alike. */
#ifndef DERIVATION_H
#define DERIVATION_H

#include <heddle.h>
#include <stdint.h>

/* Each prints its sections. */
void derive_attention(void);
void derive_keys(void);
void derive_norm_linear(void);
void derive_activations(void);
void show_mistakes(void);

/* The head of a section: "A4  dS". */
void section(const char *name, const char *title);

/* A number by the formula of the page, by central differences (NAN: there are none) and by heddle in float64. */
void line(const char *what, double formula, double differences, double heddle);

/* A gradient that heddle does not return. */
void slope(const char *what, double formula, double differences);

/* A number that nobody else has. */
void number(const char *what, double value);

/* |x - y| is within tolerance times the largest of y (at least 1); else a line tells, and the program ends with 1. */
void expect(const char *what, const double *x, const double *y, int64_t n, double tolerance);

/* The program ends with heddle's message if a call failed. */
void must_be_ok(heddle_status status);

/* A pass of heddle, with a workspace of its own; the program ends with heddle's message if it fails. */
void run_attention(const heddle_attention *a, const heddle_attention_data *t, heddle_pass pass);
void run_norm_linear(const heddle_norm_linear *a, const heddle_norm_linear_data *t, heddle_pass pass);

/* The same by the formula and in two forms: a number, and that the other form and heddle have it. */
void forms(const char *what, double formula, double other, double heddle);

/* The largest magnitude of n numbers. */
double largest(const double *x, int64_t n);

/* |x - y|² / |y|², the root of it. */
double relative_error(const double *x, const double *y, int64_t n);

#define COUNT(x) ((int64_t)(sizeof(x) / sizeof *(x)))

/* What is alike, and how nearly, in units of the largest element. */
#define ALIKE 1e-12
#define ALIKE_DIFFERENCES 1e-7
#define ALIKE_FLOAT32 4e-6

#endif
