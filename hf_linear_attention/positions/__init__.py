# SPDX-License-Identifier: Apache-2.0
"""Rotary positions and ALiBi inside feature maps, and the longest input of a model."""
