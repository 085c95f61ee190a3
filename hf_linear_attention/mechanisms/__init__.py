# SPDX-License-Identifier: Apache-2.0
"""The attention mechanisms, one per file, and their registry."""
