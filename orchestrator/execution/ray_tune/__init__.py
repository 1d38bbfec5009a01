"""Trials on Ray Tune: `cluster` connects, `driver` feeds, `worker` trains. The only package that imports ray."""
