# SPDX-License-Identifier: Apache-2.0
"""The kernels: registered operators, their checks, and the implementations in C and on CUDA. No checkpoint has them."""
