"""Tests of the studies: their programs are in ``studies`` at the top of the checkout."""
