# SPDX-License-Identifier: Apache-2.0
"""Feature maps of queries and keys."""
