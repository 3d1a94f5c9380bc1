"""What rollups, reports and the generator agree on."""

from store.journal_schema import JournalEvent as E

TRAFFIC = (
    E.NTF_RECEIVED,
    E.PUSH_SENT,
    E.PUSH_FAILED,
    E.PUSH_RETRIED,
    E.PUSH_COALESCED,
    E.PUSH_TRIMMED,
    E.CRON_SENT,
)
"Nine events of ten: summed by hour and by token."

BUCKETS_PER_OCTAVE = 16
"Latencies are counted in buckets 4.4 % wide; percentiles between their bounds are interpolated."
