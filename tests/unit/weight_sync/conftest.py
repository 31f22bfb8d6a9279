"""Helpers of these tests are beside them."""

import pytest

pytest.register_assert_rewrite("weight_models", "broadcast_bench")
