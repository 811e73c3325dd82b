"""What was measured: records, histograms, intervals, results, and their comparison."""
