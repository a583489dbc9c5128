"""The accounting database: all SQL is here."""

from gpuschedd.store.writer import Store as Store
