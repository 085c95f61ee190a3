# SPDX-License-Identifier: Apache-2.0
"""The layer that replaces stock attention: its masks, its cache, and what it has to know of the stock modules."""
