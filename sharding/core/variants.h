/* Where the compiler can, one variant of a loop for each kind of processor, chosen when the library is loaded. */
#ifndef DATAFLOW_VARIANTS_H
#define DATAFLOW_VARIANTS_H
#include <stdlib.h> /* says which C library it is */

#if defined(__x86_64__) && defined(__linux__) && defined(__GLIBC__) && !defined(__clang__) && !defined(CORE_PLAIN)
#define VARIANTS __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define VARIANTS
#endif
#endif
