# SPDX-License-Identifier: Apache-2.0
"""States of prompts: saved, loaded, and kept in a store."""
