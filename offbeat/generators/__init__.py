"""Generators: the engines that sample, and what drives one inside its process."""
