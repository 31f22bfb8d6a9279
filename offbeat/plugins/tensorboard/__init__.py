"""TensorBoard as a tracker."""
