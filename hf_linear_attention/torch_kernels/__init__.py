# SPDX-License-Identifier: Apache-2.0
"""The formulas in torch, and the registry of faster implementations of them."""
